"""How well and how fast the joint solver does at the size of large models, on synthetic traces with real skew.

One line per case: seconds, peak memory, figures on held-out tokens, and with ``--tenfold`` the objective that ten times
the time finds and how far this one is from it.  A budget is planned as work of two cores, so that on more it takes less
time: ``--cores 2`` keeps the judged run to two, while the one with ten times the work may use all.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from make_synthetic_trace import Recipe, Router  # noqa: E402

from placement import cost  # noqa: E402
from placement.cli.console import require_writable  # noqa: E402
from placement.errors import UserError  # noqa: E402
from placement.joint import solve_joint  # noqa: E402
from placement.methods import MIXED  # noqa: E402
from placement.solution import make_problem  # noqa: E402

EXAMPLES = """\
examples:
  python scripts/bench_placement_scale.py
  python scripts/bench_placement_scale.py --case 48x128-8 --cores 2 --tenfold --json scale.json
"""


@dataclass(frozen=True)
class Case:
    layers: int
    experts: int
    gpus: int
    slots: int
    seconds: float


CASES = {
    "48x128-8": Case(48, 128, 8, 128, 10),
    "58x256-8": Case(58, 256, 8, 256, 30),
    "58x256-64": Case(58, 256, 64, 320, 90),
}


def run(name: str, args: argparse.Namespace) -> dict:
    case, tokens = CASES[name], args.tokens
    router = Router(Recipe(layers=case.layers, experts=case.experts, top_k=8, seq_len=64))
    train, held_out = router.trace(tokens, 0), router.trace(tokens, 1)
    options = {"objective": MIXED, "slots": case.slots, "cap": args.cap}
    with kept_to(args.cores):
        solution = solve_joint(make_problem(train, case.gpus, seconds=case.seconds, **options))
    costs = cost.evaluate(solution.plan, held_out)
    row = {"case": name, "train_tokens": tokens, "cores": args.cores, **asdict(case)}
    row |= {"took": solution.seconds, "objective": solution.objective, "peak_mib": peak_mib()}
    row |= {f: getattr(costs, f) for f in ("compute_tail", "fan_out", "locality", "dispatch_rows")}
    if args.tenfold:
        longer = solve_joint(make_problem(train, case.gpus, seconds=10 * case.seconds, **options))
        row |= {"tenfold_objective": longer.objective, "tenfold_took": longer.seconds}
        row["behind_percent"] = 100 * (solution.objective - longer.objective) / abs(longer.objective)
    return row


@contextmanager
def kept_to(cores: int | None) -> Iterator[None]:
    """This process and its workers on so many of its cores."""
    usual = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(usual)[:cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, usual)


def peak_mib() -> float:
    """Most memory of this process plus, for each core, of the largest worker (shared pages counted twice)."""
    own, worker = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return (own + 2 * worker) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--tokens", type=int, default=8192, help="training tokens, and as many held out (default 8192)")
    parser.add_argument("--cap", type=float, default=1.05)
    parser.add_argument("--cores", type=int, metavar="N", help="cores for all but the tenfold run (default: all)")
    parser.add_argument("--tenfold", action="store_true", help="also solve with ten times the time and compare")
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    args = parser.parse_args()
    if args.cores is not None and args.cores < 1 or args.tokens < 1 or args.cap < 1:
        parser.error("tokens and cores must be at least 1, and so must the cap")
    try:
        require_writable(args.json)
    except UserError as error:
        parser.error(str(error))
    rows = []
    for name in args.case:
        row = run(name, args)
        rows.append(row)
        print(
            f"{name}: {row['took']:.1f} s (budget {row['seconds']:g}), {row['peak_mib']:.0f} MiB,"
            f" objective {row['objective']:.4f}; held-out tail {row['compute_tail']:.3f}, fan-out {row['fan_out']:.3f},"
            f" locality {row['locality']:.4f}, dispatch rows {row['dispatch_rows']:.3f}"
            + (f"; {row['behind_percent']:.2f} % behind ten times the work" if args.tenfold else ""),
            flush=True,
        )
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
