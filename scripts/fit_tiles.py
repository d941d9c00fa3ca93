#!/usr/bin/env python3
"""Measure every form of tiles over shapes and numbers of tokens; fit the constants that `tile_cost` predicts with.

    scripts/fit_tiles.py --measure FILE [--shapes E,K,D,F ...] [--tokens T ...] [--seconds 60]     (on a GPU)
    scripts/fit_tiles.py --fit FILE [FILE ...] [--cross]                                          (anywhere)

``--measure`` times both products of each form alone (graph replay, L2 flushed) and adds to FILE.  ``--fit`` prints the
table of `epmoe/ops/tiles.py` and how far its choices are from the fastest form of each case, both products alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from epmoe.ops.tile_cost import SMS, Form, Layer, Speed, fastest, product_us, worth  # noqa: E402
from epmoe.ops.tiles import FORMS  # noqa: E402

SHAPES = ("64,6,2048,1408", "60,4,2048,1408", "16,2,4096,6400", "128,8,4096,1536", "32,4,7168,2048", "8,2,6144,16384")
TOKENS = (2, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
LOW, HIGH = (50.0, 0.0, 2.5), (1000.0, 12.0, 5.5)
PARTS = ("gate_up", "down")


def layer_of(case: dict) -> Layer:
    experts, top_k, hidden, features = case["shape"]
    return Layer(experts, hidden, features, case["tokens"] * top_k, SMS)


def sizes(layer: Layer) -> tuple[tuple[int, int], tuple[int, int]]:
    """Weight rows and width of both products."""
    return (2 * layer.features, layer.hidden), (layer.hidden, layer.features)


def key(form: Form) -> str:
    t = form.tiles
    marks = "".join(f" {name}" for name in ("swap", "flatten", "specialised") if getattr(t, name))
    return f"{form.rows}+{form.tail} {t.cols}x{t.depth} {t.warps} warps {t.stages} stages {t.per_sm} per SM{marks}"


KNOWN = {key(form): form for form in FORMS}


def measure(path: Path, shapes: list[str], tokens: list[int], seconds: float) -> None:
    import torch

    from epmoe.gpu_timer import Timer
    from epmoe.tune import Shape, random_weights

    started, timer = time.monotonic(), Timer()
    cases = json.loads(path.read_text()) if path.is_file() else []
    for shape in (Shape(*map(int, text.split(","))) for text in shapes):
        weights = random_weights(shape, torch.bfloat16)
        for count in tokens:
            if time.monotonic() - started > seconds:
                print(f"out of time before {shape} at {count} tokens")
                return
            us = _measure_case(shape, weights, count, timer)
            sizes_now = [shape.experts, shape.top_k, shape.hidden, shape.features]
            cases.append({"shape": sizes_now, "tokens": count, "us": us})
            path.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")
            print(f"{shape} {count} tokens: {min(us, key=lambda name: sum(us[name]))}", flush=True)
        del weights
        torch.cuda.empty_cache()


def _measure_case(shape, weights, count: int, timer) -> dict[str, list[float]]:
    """Form -> microseconds of both products."""
    from epmoe.tune import HALF, problem, time_each

    case = problem(shape, weights, count)
    layer = Layer(shape.experts, shape.hidden, shape.features, case.pairs, SMS)
    forms = {name: form for name, form in KNOWN.items() if worth(form, layer)}
    first = next(iter(forms.values()))
    act_MF = HALF.gate_up(case, case.index(first.rows, first.tail), first.tiles)
    calls = {}
    for name, form in forms.items():
        index = case.index(form.rows, form.tail)
        calls[name] = {
            PARTS[0]: partial(HALF.gate_up, case, index, form.tiles),
            PARTS[1]: partial(HALF.down, case, index, form.tiles, act_MF),
        }
    times = time_each(calls, timer, 4 if count <= 1024 else 2)
    return {name: [round(us[part], 1) for part in PARTS] for name, us in times.items()}


def fit(cases: list[dict]) -> list[Form]:
    """The known forms with the constants that fit these cases best.

    Two kinds of measurements: each product alone, and the differences between whole layers with different tiles, which
    count twice.  Products alone run cooler than in a layer, and under the power limit that favours some forms.
    """
    place = {name: number for number, name in enumerate(KNOWN)}
    layers = [(case, layer_of(case)) for case in cases]

    def off(constants: np.ndarray) -> np.ndarray:
        speeds = constants.reshape(len(KNOWN), 2, 3)

        def us(name: str, part: int, layer: Layer) -> float:
            return product_us(layer, KNOWN[name], Speed(*speeds[place[name], part]), *sizes(layer)[part])

        away = []
        for case, layer in layers:
            away += [np.log(us(name, p, layer) / case["us"][name][p]) for name in case["us"] for p in (0, 1)]
            if whole := case.get("layers"):
                expected = np.array([us(one, 0, layer) + us(two, 1, layer) for one, two, _ in whole])
                seen = np.array([each for _, _, each in whole])
                away += list(2 * (expected - expected.mean() - seen + seen.mean()) / seen.min())
        return np.array(away)

    start = np.array([speed for form in KNOWN.values() for speed in (form.gate_up, form.down)], float).ravel()
    low, high = (np.tile(limit, 2 * len(KNOWN)) for limit in (LOW, HIGH))
    start = np.clip(start, low + 1e-6, high - 1e-6)
    scale = np.tile((600, 0.5, 4.2), 2 * len(KNOWN))
    found = least_squares(off, start, bounds=(low, high), loss="soft_l1", f_scale=0.05, x_scale=scale, max_nfev=30).x
    rounded = [Speed(round(t), round(u, 1), round(s, 2)) for t, u, s in found.reshape(-1, 3).tolist()]
    return [
        replace(form, gate_up=rounded[2 * number], down=rounded[2 * number + 1])
        for number, form in enumerate(KNOWN.values())
    ]


def is_complete(case: dict) -> bool:
    """Whether every form that may be chosen was measured."""
    return all(name in case["us"] for name, form in KNOWN.items() if worth(form, layer_of(case)))


def regret(case: dict, forms: list[Form]) -> float:
    """What the tiles that are chosen take over the fastest measured, both products together."""
    (rows, tail), *tiles = fastest(layer_of(case), forms)
    chosen = [name for each in tiles for name, f in KNOWN.items() if (f.rows, f.tail, f.tiles) == (rows, tail, each)]
    got = sum(case["us"][name][part] for part, name in enumerate(chosen))
    best = defaultdict(lambda: [np.inf, np.inf])
    for name, us in case["us"].items():
        mine = best[name.split()[0]]
        mine[:] = np.minimum(mine, us)
    return got / min(map(sum, best.values()))


def show_fit(cases: list[dict], cross: bool) -> None:
    for form in fit(cases):
        gate_up, down = (f"Speed({speed.tflops}, {speed.tile_us}, {speed.tbs})" for speed in (form.gate_up, form.down))
        print(f"{key(form)}: {gate_up}, {down}")
    whole = [case for case in cases if is_complete(case)]
    over = [regret(case, list(FORMS)) for case in whole]
    for case, each in zip(whole, over):
        if each > 1.05:
            print(f"{case['shape']} {case['tokens']} tokens: {each:.3f}")
    print(f"{len(whole)} cases with the constants of tiles.py: mean {np.mean(over):.3f}, worst {max(over):.3f}")
    for shape in dict.fromkeys(tuple(case["shape"]) for case in cases) if cross else ():
        forms = fit([case for case in cases if tuple(case["shape"]) != shape])
        over = [regret(case, forms) for case in whole if tuple(case["shape"]) == shape]
        print(f"{shape} from the other shapes: mean {np.mean(over):.3f}, worst {max(over):.3f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--measure", type=Path, metavar="FILE")
    what.add_argument("--fit", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--cross", action="store_true", help="also fit without each shape in turn (minutes)")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="E,K,D,F")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, metavar="T")
    parser.add_argument("--seconds", type=float, default=60, help="stop starting new cases after this long")
    args = parser.parse_args()
    if args.measure:
        measure(args.measure, args.shapes, args.tokens, args.seconds)
    else:
        show_fit([case for path in args.fit for case in json.loads(path.read_text())], args.cross)
    return 0


if __name__ == "__main__":
    sys.exit(main())
