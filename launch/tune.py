"""``epmoe tune``: measure which kernel tiles are fastest for a MoE layer on this GPU, and remember them.

The layer is that of a checkpoint's folder (on one of ``--ranks`` ranks), or any ``--shape E,K,D,F``: E experts on the
GPU, K choices of a token, hidden size D, feature size F of an expert. For each number of tokens a line shows the time
of the tiles that the built-in heuristic takes, and of the fastest ones found.

Results go to a file that later runs read by themselves (epmoe-tuned.json in the user's cache folder), or to ``-o
FILE``, which runs are then given as ``--tuned FILE``. Cases that the file already has are replaced, others kept.

  epmoe tune --model FOLDER --ranks 8
  epmoe tune --shape 128,8,2048,768 --tokens 1 16 256 4096 -o h200.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from epmoe.config import ModelConfig
from epmoe.ops.tuned import Tuned, TunedCase
from launch.env import has_gpu, tuned_file
from launch.hub import resolve_model
from launch.prompts import require_writable
from launch.session import Starting
from placement.errors import UserError

if TYPE_CHECKING:
    from epmoe.tune import Shape

TOKENS = (1, 16, 64, 256, 1024, 2048, 4096, 8192, 16384)
HALVES = ("bfloat16", "float16")
FP8 = "float8_e4m3fn"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="folder of a checkpoint, a hub id, or demo: the shape of its MoE layers")
    what.add_argument("--shape", metavar="E,K,D,F", help="experts, choices of a token, hidden size, feature size")
    parser.add_argument("--ranks", type=int, default=1, help="ranks that share the experts (default 1)")
    parser.add_argument(
        "--tokens",
        nargs="+",
        type=int,
        default=list(TOKENS),
        metavar="T",
        help=f"tokens of a step (default {' '.join(map(str, TOKENS))})",
    )
    parser.add_argument("--dtype", choices=(*HALVES, FP8), help="default: the model's own; bfloat16 with --shape")
    parser.add_argument("-o", "--output", metavar="FILE", help="where results go (default: the file that runs read)")
    parser.add_argument("--json", action="store_true", help="print the cases as JSON instead of lines")


def run(args: argparse.Namespace, starting: Starting | None = None) -> int:
    """The exit code."""
    if starting is not None:
        raise UserError("epmoe tune measures on one GPU; start it without torchrun")
    shape, dtype = shape_of(args)
    if bad := [count for count in args.tokens if count < 1]:
        raise UserError(f"--tokens has {bad[0]}; a step to measure has at least 1 token")
    path = Path(args.output) if args.output else tuned_file()
    known = read_tuned(path) if path.is_file() else Tuned(())
    if not has_gpu():
        raise UserError("no GPU is visible, and epmoe tune measures on one; run it where the model will run")
    with suppress(OSError):  # said better below
        path.parent.mkdir(parents=True, exist_ok=True)
    require_writable(str(path))
    console = Console(stderr=True, highlight=False)
    print_case = (lambda case: None) if args.json else (lambda case: console.print(line(case), soft_wrap=True))
    cases = measure(shape, dtype, sorted(set(args.tokens)), console, print_case)
    path.write_text(known.merged(cases).to_json(), encoding="utf-8")
    print(json.dumps([asdict(case) for case in cases]) if args.json else summary(cases, path))
    return 0


def shape_of(args: argparse.Namespace) -> tuple[Shape, str]:
    """The layer on one rank, and its dtype."""
    from epmoe.tune import Shape

    if args.shape is not None:
        try:
            experts, top_k, hidden, features = map(int, args.shape.split(","))
        except ValueError:
            raise UserError(f"--shape is {args.shape!r}; give four whole numbers E,K,D,F: 128,8,2048,768") from None
        if min(experts, top_k, hidden, features) < 1 or top_k > experts:
            raise UserError(f"--shape is {args.shape!r}; all are at least 1, and K is at most E")
        dtype = args.dtype or "bfloat16"
    else:
        model = ModelConfig.from_folder(resolve_model(args.model))
        experts, top_k, hidden, features = (
            model.num_experts,
            model.top_k,
            model.hidden_size,
            model.moe_intermediate_size,
        )
        own = FP8 if model.block_fp8 else model.dtype
        dtype = args.dtype or (own if own in (*HALVES, FP8) else "bfloat16")
    if not 1 <= args.ranks <= experts:
        raise UserError(f"--ranks is {args.ranks}; it must be from 1 to the {experts} experts")
    if dtype == FP8 and (hidden % 128 or features % 128):
        raise UserError(
            f"D {hidden} or F {features} is no multiple of 128; such 8-bit experts run as bfloat16: tune that"
        )
    slots = -(-experts // args.ranks)
    return Shape(slots, min(top_k, slots), hidden, features), dtype


def read_tuned(path: str | Path) -> Tuned:
    try:
        return Tuned.from_json(Path(path).read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read tuned tiles {path}: {reason}; give a file made by epmoe tune") from None


def measure(
    shape: Shape, dtype: str, tokens: list[int], console: Console, tell: Callable[[TunedCase], None]
) -> list[TunedCase]:
    """Tune every number of tokens, under a progress bar where standard error is a terminal."""
    import torch

    from epmoe.gpu_timer import Timer
    from epmoe.tune import problem, random_weights, tune

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    cases = []
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("making weights", total=len(tokens))
        try:
            weights, timer = random_weights(shape, getattr(torch, dtype)), Timer()
            for count in tokens:
                bar.update(task, description=f"{shape} {dtype}, {count} tokens")
                say = lambda text: console.print(text, markup=False, soft_wrap=True)  # noqa: E731
                cases.append(tune(problem(shape, weights, count), timer, say))
                tell(cases[-1])
                bar.advance(task)
        except torch.cuda.OutOfMemoryError:
            raise UserError(f"{shape} at {tokens[len(cases)]} tokens does not fit this GPU; use fewer tokens") from None
    return cases


def line(case: TunedCase) -> str:
    choice = case.choice
    tiles = f"rows {choice.rows}" if case.tokens > 1 else f"vector {choice.vector}"
    return (
        f"{case.tokens:6d} tokens: heuristic {case.heuristic_us:8.1f} us, tuned {case.tuned_us:8.1f} us"
        f" ({case.heuristic_us / case.tuned_us:.3f}x), {tiles}"
    )


def summary(cases: list[TunedCase], path: Path) -> str:
    worst = max(cases, key=lambda case: case.heuristic_us / case.tuned_us)
    return (
        f"{len(cases)} cases on {worst.device}, in {path}; the heuristic is at most"
        f" {100 * (worst.heuristic_us / worst.tuned_us - 1):.1f} % slower ({worst.tokens} tokens)"
    )
