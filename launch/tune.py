"""``epmoe tune``: measure which kernel tiles are fastest for a MoE layer on this GPU, and remember them.

The layer is that of a checkpoint's folder (on one of ``--ranks`` ranks), or any ``--shape E,K,D,F``: E experts on the
GPU, K choices of a token, hidden size D, feature size F of an expert. For each number of tokens a line shows the time
of the tiles that the built-in heuristic takes, and of the fastest ones found; a case takes one to three seconds.

Runs choose well without this: the heuristic is made to be within 5 % of the fastest tiles. Tune where those few
percent matter, or for a GPU other than the H200 that it was measured on.

Results go to a file that later runs read by themselves (epmoe-tuned.json in the user's cache folder), or to ``-o
FILE``, which runs are then given as ``--tuned FILE``. The file is written after every case, so nothing is lost when a
run is stopped: ``--resume`` then measures only what the file lacks. Without it, cases that the file already has are
replaced, others kept. A run takes a case for layers up to a factor of two away in experts and in rows of an expert.

  epmoe tune --model FOLDER --ranks 8                  tiles of a model on each of 8 GPUs
  epmoe tune --model FOLDER --ranks 8 --resume         go on after a stop, or add numbers of tokens
  epmoe tune --shape 128,8,2048,768 --tokens 1 16 256 4096 -o h200.json
  epmoe tune --shape 128,8,2048,768 --dtype float8 --json > cases.json
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from epmoe.model_config import ModelConfig
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
    parser.add_argument(
        "--dtype",
        choices=(*HALVES, "float8"),
        help="of the weights; float8: block-scaled (default: the model's own; bfloat16 with --shape)",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="where results go (default: the file that runs read)")
    parser.add_argument("--resume", action="store_true", help="measure only cases that the file lacks")
    parser.add_argument("--json", action="store_true", help="print the cases as JSON instead of lines")


def run(args: argparse.Namespace, starting: Starting | None = None) -> int:
    """The exit code."""
    if starting is not None:
        raise UserError("epmoe tune measures on one GPU; start it without torchrun")
    shape, dtype = shape_of(args)
    if bad := [count for count in args.tokens if count < 1]:
        raise UserError(f"--tokens has {bad[0]}; a step to measure has at least 1 token")
    path = Path(args.output) if args.output else tuned_file()
    tuned = read_tuned(path) if path.is_file() else Tuned(())
    if not has_gpu():
        raise UserError("no GPU is visible, and epmoe tune measures on one; run it where the model will run")
    with suppress(OSError):  # said better below
        path.parent.mkdir(parents=True, exist_ok=True)
    require_writable(str(path))
    tokens = sorted(set(args.tokens))
    console = Console(stderr=True, highlight=False)
    done = _known(tuned, shape, dtype, tokens) if args.resume else []
    if done:
        console.print(f"{len(done)} of {len(tokens)} cases are in {path} already", soft_wrap=True)
    missing = [count for count in tokens if count not in {case.tokens for case in done}]
    try:
        for case in measure(shape, dtype, missing, console) if missing else ():
            tuned = tuned.merged([case])
            _write(path, tuned)
            done.append(case)
            if not args.json:
                console.print(line(case), soft_wrap=True)
    except KeyboardInterrupt:
        console.print(f"{len(done)} of {len(tokens)} cases are in {path}; --resume measures the rest", soft_wrap=True)
        raise
    done.sort(key=lambda case: case.tokens)
    print(json.dumps([asdict(case) for case in done]) if args.json else summary(done, path))
    return 0


def _known(tuned: Tuned, shape: Shape, dtype: str, tokens: list[int]) -> list[TunedCase]:
    """What the file has of this very layer, on the GPU at hand."""
    import torch

    sizes = (shape.experts, shape.top_k, shape.hidden, shape.features)
    wanted = {(torch.cuda.get_device_name(), *sizes, dtype, count) for count in tokens}
    return [case for case in tuned.cases if case.key in wanted]


def _write(path: Path, tuned: Tuned) -> None:
    """All at once: a run that starts meanwhile reads the old file or the new one."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        beside.write_text(tuned.to_json(), encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; give another file by -o") from None


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
        own = "float8" if model.block_fp8 else model.dtype
        dtype = args.dtype or (own if own in (*HALVES, "float8") else "bfloat16")
    dtype = FP8 if dtype == "float8" else dtype
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


def measure(shape: Shape, dtype: str, tokens: list[int], console: Console) -> Iterator[TunedCase]:
    """Tune every number of tokens, under a progress bar where standard error is a terminal."""
    import torch

    from epmoe.gpu_timer import Timer
    from epmoe.tune import Listener, problem, random_weights, tune

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"{shape} {dtype}: making weights", total=len(tokens))
        fits = "the weights"
        try:
            weights, timer = random_weights(shape, getattr(torch, dtype)), Timer()
            for number, count in enumerate(tokens):
                fits = f"a step of {count} tokens"

                def step(what: str, share: float, number: int = number, count: int = count) -> None:
                    bar.update(task, description=f"{count} tokens: {what}", completed=number + share)

                listener = Listener(lambda text: console.print(text, markup=False, soft_wrap=True), step)
                yield tune(problem(shape, weights, count), timer, listener)
                bar.update(task, completed=number + 1)
        except torch.cuda.OutOfMemoryError:
            free = torch.cuda.mem_get_info()[0] / 2**30
            remedy = "raise --ranks" if fits == "the weights" else "use fewer --tokens; cases before it are kept"
            what = f"{fits} of {shape} {dtype}"
            raise UserError(f"this GPU ({free:.0f} GiB are free) cannot hold {what}; {remedy}") from None


def line(case: TunedCase) -> str:
    choice = case.choice
    tiles = (
        f"vector {choice.vector}" if choice.vector else f"rows {choice.rows}{f' + {choice.tail}' * bool(choice.tail)}"
    )
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
