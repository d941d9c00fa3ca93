"""``epmoe generate``: continue prompts on the ranks of one run, and say how it went."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from typing import Any

from epmoe.config import EngineConfig, ModelConfig
from epmoe.engine.request import SamplingParams
from launch import args as shared
from launch.completion import Completion
from launch.plans import choose_plan
from launch.progress import Progress
from launch.prompts import Prompt, read_prompts, require_writable, write_results
from launch.report import RunReport, summary
from launch.session import Session, Starting, spawned
from launch.signals import Drain
from placement.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_model_arguments(parser)
    parser.add_argument("--prompt-file", help="prompts, one a line, or JSONL with prompt or prompt_token_ids")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    parser.add_argument("--json", metavar="FILE", help="write the results there, in the order of the prompts")
    shared.add_sampling_arguments(parser)
    shared.add_engine_arguments(parser)


def run(args: argparse.Namespace, starting: Starting | None = None) -> int:
    """The front's work, whoever starts the ranks; the exit code."""
    prompts = _prompts(args)
    params = shared.sampling_params(args)
    if args.json:
        require_writable(args.json)
    starting = starting or spawned(shared.rank_count(args))
    engine, model = shared.engine_config(args, starting)
    plan, trace = choose_plan(args.placement, args.trace, model.moe_shape, starting.world)
    engine = replace(engine, plan=plan.to_json())
    with Progress() as progress, Drain() as drain, Session(starting, engine, progress.say) as session:
        tokenizer = load_tokenizer(engine.model)
        completions = [_completion(prompt, tokenizer, params, engine, model) for prompt in prompts]
        progress.phase("loading weights")
        ready = session.wait_ready()
        progress.phase("generating", total=len(completions))
        drain.arm()
        started = time.perf_counter()
        exit_code = _run_all(session, completions, params, progress, drain)
        seconds = time.perf_counter() - started
        stats = session.stop()
    if args.json:
        write_results(args.json, [completion.to_dict() for completion in completions])
    else:
        _print_texts(completions)
    print(summary(RunReport(engine, args.placement, plan, trace, completions, seconds, ready, stats)))
    return exit_code


def load_tokenizer(folder: str) -> Any:
    """The checkpoint's own tokenizer; the import takes seconds, so it comes while the ranks start."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"cannot load the tokenizer of {folder}: {reason}; put its files beside the weights") from None


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    prompts = [Prompt(text, None, f"--prompt {number}") for number, text in enumerate(args.prompt, 1)]
    if args.prompt_file is not None:
        prompts += read_prompts(args.prompt_file)
    if not prompts:
        raise UserError("there is nothing to continue; give --prompt TEXT or --prompt-file FILE")
    return prompts


def _completion(
    prompt: Prompt, tokenizer: Any, params: SamplingParams, engine: EngineConfig, model: ModelConfig
) -> Completion:
    ids = list(prompt.token_ids) if prompt.token_ids is not None else tokenizer(prompt.text).input_ids
    if not ids:
        raise UserError(f"{prompt.where}: the prompt has no token; give at least one")
    if max(ids) >= model.vocab_size:
        raise UserError(f"{prompt.where}: token id {max(ids)} is outside the vocabulary of {model.vocab_size}")
    if len(ids) >= engine.max_model_len:
        raise UserError(
            f"{prompt.where}: the prompt has {len(ids)} tokens, and max_model_len {engine.max_model_len} must hold them"
            " and one more; shorten it or raise --max-model-len"
        )
    return Completion(prompt.text, ids, tokenizer, params.stop)


def _run_all(
    session: Session, completions: list[Completion], params: SamplingParams, progress: Progress, drain: Drain
) -> int:
    """Send every prompt and collect until all are finished; 0, or 128 + the signal that cut it short."""
    by_id = {session.add(c.prompt_token_ids, params.to_dict()): c for c in completions}
    left = set(by_id)
    draining = False
    while left:
        for event in session.events():
            completion = by_id[event.id]
            before = len(completion.token_ids)
            if completion.take(event.token_ids, event.finish_reason):
                session.abort(event.id)
            progress.add_tokens(len(completion.token_ids) - before)
            if event.finish_reason is not None:
                left.discard(event.id)
                progress.advance()
        if drain.signal and not draining:
            draining = True
            waiting = [id_ for id_ in left if not by_id[id_].token_ids]
            for id_ in waiting:
                session.abort(id_)
            progress.say(
                f"stopping: {len(left) - len(waiting)} running requests finish, {len(waiting)} waiting ones are"
                " dropped; a second signal stops at once"
            )
    return 128 + drain.signal if drain.signal else 0


def _print_texts(completions: list[Completion]) -> None:
    for completion in completions:
        shown = completion.prompt if completion.prompt is not None else f"{len(completion.prompt_token_ids)} tokens"
        sys.stdout.write(f"=== {shown}\n{completion.text}\n\n")
