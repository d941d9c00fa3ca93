"""What choosing home ranks together with the placement saves: dispatch rows on held-out requests.

Sequences are split in halves file by file, then cut into requests; homes of held-out requests are chosen, as one
balanced batch, from the routing of a probe, from prompt token ids, or (unreachable in practice) from all their routing.
The price of uneven load comes from training sequences alone, by resampling and from half to half of the recordings.
The baseline is linear placement with round-robin homes.  All figures weigh tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np  # noqa: E402

from placement import cost  # noqa: E402
from placement.cli.console import require_writable  # noqa: E402
from placement.cohome import place_with_homes  # noqa: E402
from placement.errors import UserError  # noqa: E402
from placement.homes import Affinity, assign_homes, home_slack, remote_rows_RW, score_prompt, score_routing  # noqa: E402
from placement.plan import Plan, linear_plan  # noqa: E402
from placement.solution import make_problem  # noqa: E402
from placement.trace import Trace, join, load_trace  # noqa: E402
from placement.unseen import even_for_unseen  # noqa: E402

DSV2 = tuple(f"dsv2lite_{name}" for name in ("intent", "law", "summary"))
LANGUAGES = ("code_python", "de_man", "en_kernel", "fr_man", "pt_book", "ru_book", "zh_book")
SMALL = tuple(f"small32x4_{name}" for name in LANGUAGES)
EXAMPLES = """\
examples:
  python scripts/bench_homes.py --traces ../shared/traces
  python scripts/bench_homes.py --case dsv2lite-8 --seconds 30 --json homes.json
  python scripts/bench_homes.py --case dsv2lite-8 dsv2lite-8-redundant --seed 0 1 2 --split 0 1 2
  python scripts/bench_homes.py --case small-8 --cap 1.02 1.05 1.1 1.2 1.4 --plot frontier.png
"""


@dataclass(frozen=True)
class Case:
    """``probe``: tokens seen before a home is chosen."""

    files: tuple[str, ...]
    gpus: int
    redundant: int
    probe: int


CASES = {
    "dsv2lite-8": Case(DSV2, 8, 0, 32),
    "dsv2lite-8-redundant": Case(DSV2, 8, 1, 32),
    "small-4": Case(SMALL, 4, 0, 64),
    "small-8": Case(SMALL, 8, 0, 64),
}
REQUEST = 256
FIGURES = ("dispatch_rows", "compute_tail", "compute_tail_worst_layer", "compute_tail_lp", "home_tail", "fan_out")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"), metavar="DIR")
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--unseen-cap",
        type=float,
        default=1.085,
        metavar="X",
        help="tail that unseen tokens should keep: training sequences alone say what price of uneven load that needs"
        " (default 1.085: errors of 0.01 remain)",
    )
    parser.add_argument("--cap", type=float, nargs="+", help="load caps on training tokens themselves (a frontier)")
    parser.add_argument("--seconds", type=float, default=60.0, help="solver's budget per line (default 60)")
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--split",
        type=int,
        nargs="+",
        default=[0],
        help="0: train on each file's first half of sequences; 1: on its second; N > 1: on a random half of seed N",
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    parser.add_argument("--plot", metavar="FILE.png", help="draw rows saved against compute tail")
    args = parser.parse_args()
    try:
        require_writable(args.json, args.plot)
        rows = run_all(args)
    except UserError as error:
        parser.error(str(error))
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        plot(rows, args.plot)


def run_all(args: argparse.Namespace) -> list[dict]:
    rows = []
    for name in args.case:
        for split, seed, cap in product(args.split, args.seed, args.cap or [None]):
            for row in run(name, split, seed, cap, args):
                rows.append(row)
                print(describe(row), flush=True)
        summarise([row for row in rows if row["case"] == name], args)
    return rows


def run(name: str, split: int, seed: int, cap: float | None, args: argparse.Namespace) -> list[dict]:
    case = CASES[name]
    halves = [split_file(load_trace(args.traces / f"{file}.npz"), split) for file in case.files]
    recordings = tuple(half[0].seq_lens for half in halves)
    train, held_out = (join([requests(half[i]) for half in halves], name) for i in (0, 1))
    base = cost.evaluate(linear_plan(held_out.shape, case.gpus), held_out)
    options = {"cap": cap or args.unseen_cap, "seconds": args.seconds, "seed": seed, "redundant": case.redundant}
    problem = make_problem(train, case.gpus, objective="dispatch_rows", recordings=recordings, **options)
    if cap is None:
        problem = even_for_unseen(problem)
    processor = time.process_time()
    solution, _, affinity = place_with_homes(problem, probe=case.probe)
    rows = []
    for source, score_RW in scores(solution.plan, held_out, affinity, case.probe).items():
        homes = assign_homes(score_RW, held_out.seq_lens, home_slack(solution.plan))
        costs = cost.evaluate(solution.plan, held_out, homes=homes)
        row = {
            "case": name,
            **asdict(case),
            "split": split,
            "seed": seed,
            "train_cap": problem.cap,
            "drift": problem.drift,
        }
        row |= {"homes_from": source, "seconds": solution.seconds, "processor": time.process_time() - processor}
        row["saved_percent"] = 100 * (1 - costs.dispatch_rows / base.dispatch_rows)
        row["linear_dispatch_rows"] = base.dispatch_rows
        rows.append(row | {figure: getattr(costs, figure) for figure in FIGURES})
    return rows


def split_file(trace: Trace, split: int) -> tuple[Trace, Trace]:
    """(train, held out): whole sequences, see ``--split``."""
    if split > 1:
        trace = trace.take_sequences(np.random.default_rng(split).permutation(len(trace.seq_lens)))
    parts = trace.split(0.5)
    return parts[::-1] if split == 1 else parts


def describe(row: dict) -> str:
    return (
        f"{row['case']:>20} split {row['split']} seed {row['seed']} cap {row['train_cap']:.3f}"
        f" homes from {row['homes_from']:>6}: {row['saved_percent']:5.2f} % fewer dispatch rows,"
        f" tail {row['compute_tail']:.4f} (best split {row['compute_tail_lp']:.4f}), home load {row['home_tail']:.3f},"
        f" {row['seconds']:.0f} s"
    )


def summarise(rows: list[dict], args: argparse.Namespace) -> None:
    """Mean, spread and worst over seeds and splits."""
    if args.cap or len(args.seed) * len(args.split) == 1:
        return
    for source in dict.fromkeys(row["homes_from"] for row in rows):
        line = f"{rows[0]['case']:>20} homes from {source:>6}, {len(args.seed) * len(args.split)} runs:"
        for figure, worst in (("saved_percent", min), ("compute_tail", max), ("home_tail", max)):
            values = [row[figure] for row in rows if row["homes_from"] == source]
            line += f" {figure} {np.mean(values):.3f} +- {np.std(values, ddof=1):.3f} (worst {worst(values):.3f})"
        print(line, flush=True)


def requests(trace: Trace) -> Trace:
    """The trace with its sequences cut into requests of at most ``REQUEST`` tokens."""
    whole = [[REQUEST] * (n // REQUEST) + ([n % REQUEST] if n % REQUEST else []) for n in trace.seq_lens.tolist()]
    return replace(trace, seq_lens=np.array([n for part in whole for n in part], np.int64))


def scores(plan: Plan, trace: Trace, affinity: Affinity, probe: int) -> dict[str, np.ndarray]:
    starts = trace.sequence_starts()
    heads = [slice(a, min(a + probe, b)) for a, b in zip(starts, starts[1:])]
    ids = trace.expert_ids_TLK
    found = {"probe": np.stack([score_routing(ids[head], affinity.expert_rank_LEW) for head in heads])}
    if trace.token_ids_T is not None:
        found["tokens"] = np.stack([score_prompt(trace.token_ids_T[head], affinity.token_rank_VW) for head in heads])
    return found | {"all": -remote_rows_RW(plan, trace)}


def plot(rows: list[dict], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for case in dict.fromkeys(row["case"] for row in rows):
        for source in ("probe", "tokens", "all"):
            points = [
                (r["compute_tail"], r["saved_percent"]) for r in rows if (r["case"], r["homes_from"]) == (case, source)
            ]
            if points:
                axes.plot(*zip(*sorted(points)), marker="o", label=f"{case}, homes from {source}")
    axes.set(xlabel="held-out compute tail (max / mean)", ylabel="dispatch rows saved, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
