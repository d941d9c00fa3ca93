"""Kernels compiled before anything is timed: every part once in small, all of them beside each other.

Ranks of one group compile the same kernels at the same time, as they must; groups of different parts compile different
ones, so that a cold cache costs the longest of them and not their sum.  What the groups find is thrown away.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product

from bench_exchange import run_cases
from exchange_bench_lib import Case
from rank_group import RankGroup
from report_engine import open_engine, serve
from report_model import Work, first_layers, measure_model
from report_parts import Part, count_compiles
from report_promises import checked, random_plan, settings, texts

from epmoe.comm import Comm


class Warmers:
    """Groups of ranks under way, ``{name: (function, values)}``; `wait` ends them."""

    def __init__(self, where: tuple[int, str], work: dict[str, tuple[Callable, tuple]]) -> None:
        self.began = time.monotonic()
        self.groups = {name: RankGroup(*where, function, *values) for name, (function, values) in work.items()}

    def wait(self, ends: float) -> dict:
        """Seconds of each group, or why it ended; what is not through at ``ends`` is killed."""
        found: dict[str, object] = {}
        while len(found) < len(self.groups) and time.monotonic() < ends:
            for name in self.groups.keys() - found.keys():
                try:
                    if self.groups[name].ended():
                        found[name] = round(time.monotonic() - self.began, 1)
                except Exception as error:  # the part itself will say so again
                    found[name] = str(error)[-600:]
        for name, group in self.groups.items():
            group.close()
            found.setdefault(name, "not through, killed")
        return {"seconds": round(time.monotonic() - self.began, 1), "found": found}


def warm_up(kinds: list[str], small: bool, parts: list[Part]) -> dict[str, tuple[Callable, tuple]]:
    """What `Warmers` need for these parts."""
    found: dict[str, tuple[Callable, tuple]] = {}
    for part in parts:
        if part.name == "promises":
            found["one rank"] = (warm_alone, ())
            found["promises"] = (warm_promises, (kinds,))
        if part.name == "exchanges":
            found["exchanges"] = (warm_exchanges, (kinds, small))
        if part.name == "model":
            found["model"] = (warm_model, part.values)
    return found


def warm_alone(comm: Comm) -> None:
    """The embedded model on one rank, as the tokens that all others must draw are made."""
    if comm.rank == 0:
        compiled = count_compiles()
        serve(open_engine(Comm(0, 1, comm.device), settings()), texts())
        print(f"   warm, one rank: {sum(each for _, each in compiled):.1f} s of {len(compiled)} kernels", flush=True)


def warm_promises(comm: Comm, kinds: list[str]) -> None:
    for kind, overlap in product(kinds, ("on", "off")):
        chosen = {"plan": random_plan(comm.world).to_json(), "exchange": kind, "overlap": overlap}
        checked(comm, chosen, texts(), {})


def warm_exchanges(comm: Comm, kinds: list[str], small: bool) -> None:
    dtype = "float32" if comm.device.type == "cpu" else "bfloat16"
    hidden = 256 if small else 7168
    cases = [Case(name, tokens, hidden, 8, "even", combine, dtype)
             for combine in ("reduce", "exact") for name in kinds for tokens in (1, 33, 256)]  # fmt: skip
    run_cases(comm, cases, 1, say=lambda comm, text: None)


def warm_model(comm: Comm, work: Work) -> None:
    measure_model(comm, lambda found: None, 600, first_layers(work, 2), say=lambda comm, row: None)
