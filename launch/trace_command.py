"""``epmoe trace``: run a text through the model once and record which experts its tokens choose.

The text is cut into sequences of at most ``--max-tokens-per-sequence`` tokens, each run as a prompt of its own:

- ``--split windows`` (default): each file is one text, cut every N tokens; the last, shorter piece is kept.
- ``--split paragraphs``: a sequence for each stretch between blank lines.
- ``--split lines``: a sequence for each line; JSONL with ``prompt`` or ``prompt_token_ids`` works too.

Longer paragraphs and lines are cut every N tokens as well.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from epmoe.config import EngineConfig
from epmoe.engine.request import SamplingParams
from epmoe.model_config import ModelConfig
from launch import args as shared
from launch import recording
from launch.completion import Completion
from launch.generate import run_all
from launch.progress import Progress
from launch.prompts import Prompt, read_prompts, require_writable
from launch.requests import Requests
from launch.session import Session, Starting, spawned
from launch.signals import Drain
from launch.tokenizer import encode, load_tokenizer, tokenizer_sha256
from placement.errors import UserError

SPLITS = ("windows", "paragraphs", "lines")
LONGEST_TOKEN = 16  # characters; text beyond that many per token wanted is not read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    shared.add_model_arguments(parser)
    parser.add_argument("--text-file", action="append", required=True, help="UTF-8 text; may be repeated")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the trace to write (.npz)")
    parser.add_argument("--split", default="windows", choices=SPLITS, help="what a sequence is (default windows)")
    parser.add_argument(
        "--max-tokens-per-sequence",
        type=int,
        metavar="N",
        help="longest sequence (default 512, if the engine's is longer)",
    )
    shared.add_record_tokens(parser)
    shared.add_engine_arguments(parser)


def run(args: argparse.Namespace, starting: Starting | None = None) -> int:
    """The front's work, whoever starts the ranks; the exit code."""
    require_writable(args.output)
    recording.limit_per_rank(args.record_tokens, 1)
    texts = [prompt for path in args.text_file for prompt in read_texts(path, args.split, args.record_tokens)]
    starting = starting or spawned(shared.rank_count(args))
    engine, model = shared.engine_config(args, starting)
    engine = replace(engine, record_tokens=args.record_tokens)  # on each rank: the front sends no more in all
    longest = _longest(args.max_tokens_per_sequence, engine)
    params = SamplingParams(max_tokens=1, temperature=0)  # the token drawn after a sequence is never run
    with Progress() as progress, Drain() as drain, Session(starting, engine, progress.say) as session:
        tokenizer = load_tokenizer(engine.model)
        pieces = list(cut(_encoded(texts, tokenizer, engine, model), longest, args.record_tokens))
        progress.phase("loading weights")
        session.wait_ready(progress.reached)
        requests = Requests(session, keep_lengths=True)
        progress.phase("recording", total=len(pieces))
        drain.arm()
        completions = [Completion(None, ids, tokenizer, ()) for ids in pieces]
        started = time.perf_counter()
        exit_code = run_all(requests, completions, params, progress, drain)
        seconds = time.perf_counter() - started
        session.stop()
    if failed := [each for each in completions if each.finish_reason == "error"]:
        said = f"{len(failed)} of {len(completions)} sequences have no routing to record: {failed[0].stop_reason}"
        raise UserError(f"{args.output} is not written: {said}")
    hashed = tokenizer_sha256(engine.model)
    recorded = recording.merge(session.recorded, model.moe_shape, requests.lengths(), hashed)
    if recorded is not None:
        recorded = replace(recorded, full=recorded.trace.num_tokens == args.record_tokens)
    if recorded is not None:
        print(f"{seconds:.2f} s, {recorded.trace.num_tokens / max(seconds, 1e-9):.0f} tokens/s")
    print(recording.save(recorded, args.output))
    return exit_code


def read_texts(path: str, split: str, tokens: int) -> list[Prompt]:
    """The stretches of a file that may not share a sequence."""
    if split == "lines":
        return read_prompts(path)
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(tokens * LONGEST_TOKEN)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read text file {path}: {reason}; give UTF-8 text") from None
    pieces = re.split(r"\n[^\S\n]*\n\s*", text) if split == "paragraphs" else [text]
    prompts = [Prompt(piece, None, f"{path}, {split[:-1]} {n}") for n, piece in enumerate(pieces, 1) if piece.strip()]
    if not prompts:
        raise UserError(f"text file {path} holds no text; give one that does")
    return prompts


def cut(sequences: Iterator[list[int]], longest: int, tokens: int) -> Iterator[list[int]]:
    """Pieces of at most ``longest`` tokens of each sequence, until they have ``tokens`` in all."""
    for ids in sequences:
        for start in range(0, len(ids), longest):
            piece = ids[start : start + min(longest, tokens)]
            tokens -= len(piece)
            if not piece:
                return
            yield piece


def _encoded(texts: list[Prompt], tokenizer: Any, engine: EngineConfig, model: ModelConfig) -> Iterator[list[int]]:
    endless = replace(engine, max_model_len=1 << 62)  # what is too long is cut
    return (encode(text, tokenizer, endless, model) for text in texts)


def _longest(asked: int | None, engine: EngineConfig) -> int:
    if asked is None:
        return min(512, engine.max_model_len - 1)
    if not 1 <= asked < engine.max_model_len:
        raise UserError(
            f"--max-tokens-per-sequence is {asked}; it must be from 1 to max_model_len - 1 = {engine.max_model_len - 1}"
        )
    return asked
