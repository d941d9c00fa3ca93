"""One lane or two: which is faster for a step, from each rank's tokens and the stages' times.

Two lanes hide communication under compute, and pay for it: every stage runs twice at half the size, the experts'
weights are read twice, and small kernels do not get faster by half.  Pure functions of the step's headers and of
times that were measured at start-up (`moe.calibrate`), both the same on all ranks: so all agree.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from epmoe.moe.makespan import LAYER, Task, layer_tasks, makespan

LAYERS = 4  # of the graph that is compared; start and end weigh a little more than in a whole model
GAIN = 0.98  # two lanes must promise at least this
# Compute that runs beside a transfer is slower than alone: with an emulated link two lanes took 1.04 to 1.11 times what
# their stages alone promise (from 1024 tokens on, two models, two links), one lane 0.98 to 1.08 times.
BESIDE = 1.08
OWN = ("attention", "router", "shared", "dispatch", "combine", "sum")  # grow with the rank's own tokens
TURNS = (("attention", "router", "dispatch", "shared"), ("experts", "combine"), ("sum",))


@dataclass(frozen=True)
class StageTimes:
    """Microseconds of each stage of one layer at ascending numbers of tokens per rank (of the experts: at as many on
    every rank)."""

    tokens: tuple[int, ...]
    us: tuple[tuple[str, tuple[float, ...]], ...]

    @staticmethod
    def of(tokens: Sequence[int], us: Mapping[str, Sequence[float]]) -> StageTimes:
        assert list(tokens) == sorted(set(tokens)) and len(tokens) > 1, f"sizes {tokens}"
        assert us.keys() <= LAYER.keys() and all(len(times) == len(tokens) for times in us.values()), us
        return StageTimes(tuple(tokens), tuple((stage, tuple(us[stage])) for stage in sorted(us)))

    def at(self, stage: str, tokens: float) -> float:
        """Between two sizes on a line, above the largest on the last one; below the smallest as there; of none 0."""
        times = dict(self.us).get(stage)
        if times is None or tokens <= 0:
            return 0.0
        k = min(max(bisect_left(self.tokens, tokens), 1), len(self.tokens) - 1)
        (a, b), (low, high) = self.tokens[k - 1 : k + 1], times[k - 1 : k + 1]
        return low + (high - low) * max(tokens - a, 0) / (b - a)


@dataclass(frozen=True)
class LaneTimes:
    """What stages take in a step of one lane, and in one of two, whose kernels leave SMs to the exchange's."""

    one: StageTimes
    two: StageTimes


@lru_cache(maxsize=1024)
def choose_lanes(tokens_W: tuple[int, ...], times: LaneTimes) -> int:
    """1 or 2 lanes for a step in which rank w has ``tokens_W[w]`` tokens."""
    if max(tokens_W) < 2:
        return 1
    return 2 if BESIDE * split_time(tokens_W, times.two) <= GAIN * unsplit_time(tokens_W, times.one) else 1


def unsplit_time(tokens_W: Sequence[int], times: StageTimes) -> float:
    """Of ``LAYERS`` layers in one lane; shared experts run beside the dispatch."""
    return _run([_slowest(tokens_W, times)])


def split_time(tokens_W: Sequence[int], times: StageTimes) -> float:
    """Of ``LAYERS`` layers in two lanes of half the tokens each, in the order of ``moe.overlap``."""
    first = _slowest([-(-tokens // 2) for tokens in tokens_W], times)
    return _run([first, _slowest([tokens // 2 for tokens in tokens_W], times)])


def _slowest(tokens_W: Sequence[int], times: StageTimes) -> dict[str, float]:
    """Each stage on the rank where it takes longest: ranks meet at every exchange. Experts see all ranks' tokens."""
    most, mean = max(tokens_W), sum(tokens_W) / len(tokens_W)
    slowest = {stage: times.at(stage, most) for stage in OWN}
    return {**slowest, "experts": times.at("experts", mean)}


def _run(lanes: Sequence[Mapping[str, float]]) -> float:
    tasks = layer_tasks(lanes, LAYERS)
    return makespan(tasks, _issue_order(tasks, len(lanes)))


def _issue_order(tasks: Sequence[Task], lanes: int) -> list[int]:
    """Tasks as ``moe.overlap.run_lanes`` issues them."""
    number = {task.name: n for n, task in enumerate(tasks)}
    turns = [(layer, turn) for layer in range(LAYERS) for turn in TURNS]
    # The sum of a layer and the attention of the next are one turn.
    merged = [turns[0:1]] + [turns[k : k + (2 if turns[k][1] == TURNS[2] else 1)] for k in _turn_starts(len(turns))]
    names = (
        f"{lane}.{layer}.{stage}"
        for group in merged
        for lane in range(lanes)
        for layer, turn in group
        for stage in turn
    )
    return [number[name] for name in names if name in number]


def _turn_starts(turns: int) -> list[int]:
    """Positions of the turns after the first one, an attention's counted with the sum before it."""
    return [k for k in range(1, turns) if k % len(TURNS)]
