"""``epmoe generate``: continue prompts on the ranks of one run, and say how it went."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from epmoe.engine.request import SamplingParams
from launch import args as shared
from launch import recording
from launch.completion import Completion
from launch.plans import choose_plan, with_plan
from launch.progress import Progress
from launch.prompts import Prompt, read_prompts, require_writable, write_results
from launch.report import RunReport, summary
from launch.requests import Requests
from launch.session import Session, Starting, spawned
from launch.signals import Drain
from launch.timeline import spans_by_rank, write_timeline
from launch.timeline import summary as stage_summary
from launch.tokenizer import encode, load_tokenizer, tokenizer_sha256
from placement.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_model_arguments(parser)
    shared.add_placement_arguments(parser)
    parser.add_argument("--prompt-file", help="prompts, one a line, or JSONL with prompt or prompt_token_ids")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    parser.add_argument("--json", metavar="FILE", help="write the results there, in the order of the prompts")
    shared.add_recording_arguments(parser)
    parser.add_argument("--timeline", metavar="FILE", help="when each stage ran, for ui.perfetto.dev, and a summary")
    shared.add_sampling_arguments(parser)
    shared.add_engine_arguments(parser)


def run(args: argparse.Namespace, starting: Starting | None = None) -> int:
    """The front's work, whoever starts the ranks; the exit code."""
    prompts = _prompts(args)
    params = shared.sampling_params(args)
    require_writable(args.json, args.record_trace, args.timeline)
    starting = starting or spawned(shared.rank_count(args))
    engine, model = shared.engine_config(args, starting)
    plan, trace = choose_plan(args.placement, args.trace, model.moe_shape, starting.world)
    engine = with_plan(engine, plan, args.placement)
    if args.record_trace:
        engine = replace(engine, record_tokens=recording.limit_per_rank(args.record_tokens, starting.world))
    engine = replace(engine, timeline=bool(args.timeline))
    with Progress() as progress, Drain() as drain, Session(starting, engine, progress.say) as session:
        tokenizer = load_tokenizer(engine.model)
        encoded = [(prompt.text, encode(prompt, tokenizer, engine, model)) for prompt in prompts]
        completions = [
            Completion(*each, tokenizer, params.stop, index) for each in encoded for index in range(params.n)
        ]
        progress.phase("loading weights")
        ready = session.wait_ready(progress.reached)
        requests = Requests(session, keep_lengths=bool(args.record_trace))
        progress.phase("generating", total=len(completions))
        drain.arm()
        started = time.perf_counter()
        exit_code = run_all(requests, completions, params, progress, drain)
        seconds = time.perf_counter() - started
        stats = session.stop()
    lines, problems = [], []  # files first: whoever reads the output may leave
    if args.json and (unwritten := write_results(args.json, [_entry(each, params) for each in completions])):
        problems.append(unwritten)
    print_texts = bool(problems) or not args.json
    problems += _errors(prompts, completions, params)
    recorded = None
    if args.record_trace:
        hashed = tokenizer_sha256(engine.model)
        recorded = recording.merge(session.recorded, model.moe_shape, requests.lengths(), hashed)
        _write(partial(recording.save, recorded), args.record_trace, lines, problems)
    if args.timeline:
        _write(partial(write_timeline, messages=session.timeline), args.timeline, lines, problems)
        lines += stage_summary(spans_by_rank(session.timeline))
    if print_texts:
        _print_texts(completions)
    print(*lines, sep="\n", end="\n" if lines else "")
    print(summary(RunReport(engine, args.placement, plan, trace, completions, seconds, ready, stats, recorded)))
    if problems:
        raise UserError("; ".join(problems))
    return exit_code


def _write(write: Callable[[str], str], path: str, lines: list[str], problems: list[str]) -> None:
    """Write the file: a line that says so, or else a problem."""
    try:
        lines.append(write(path))
    except UserError as error:
        problems.append(str(error))


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    prompts = [Prompt(text, None, f"--prompt {number}") for number, text in enumerate(args.prompt, 1)]
    if args.prompt_file is not None:
        prompts += read_prompts(args.prompt_file)
    if not prompts:
        raise UserError("there is nothing to continue; give --prompt TEXT or --prompt-file FILE")
    return prompts


def run_all(
    requests: Requests, completions: list[Completion], params: SamplingParams, progress: Progress, drain: Drain
) -> int:
    """Send every request and collect until all are finished; 0, or 128 + the signal that cut it short."""
    left = {requests.submit(completion, params): completion for completion in completions}
    draining = False
    while left:
        for gain in requests.advance():
            progress.add_tokens(gain.tokens)
            if gain.ended:
                del left[gain.id]
                progress.advance()
        if drain.signal and not draining:
            draining = True
            waiting = [number for number, completion in left.items() if not completion.token_ids]
            for number in waiting:
                requests.abort(number)
            progress.say(
                f"stopping: {len(left) - len(waiting)} running requests finish, {len(waiting)} waiting ones are"
                " dropped; a second signal stops at once"
            )
    return 128 + drain.signal if drain.signal else 0


def _errors(prompts: list[Prompt], completions: list[Completion], params: SamplingParams) -> list[str]:
    """A line about the first request that could not go on, if any."""
    failed = [n for n, completion in enumerate(completions) if completion.finish_reason == "error"]
    if not failed:
        return []
    first = failed[0]
    where = prompts[first // params.n].where
    return [f"{len(failed)} of {len(completions)} requests ended early; {where}: {completions[first].stop_reason}"]


def _entry(completion: Completion, params: SamplingParams) -> dict:
    """The completion in ``--json``: more keys only where ``--n`` and ``--logprobs`` ask for them."""
    entry = completion.to_dict()
    if params.n > 1:
        entry["index"] = completion.index
    if params.logprobs is not None:
        entry["logprobs"] = completion.logprobs
    return entry


def _print_texts(completions: list[Completion]) -> None:
    for completion in completions:
        shown = completion.prompt if completion.prompt is not None else f"{len(completion.prompt_token_ids)} tokens"
        print(f"=== {shown}\n{completion.text}\n")
