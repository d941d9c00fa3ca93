"""One lane or two: which is faster for a step, from each rank's tokens and the stages' times.

Two lanes hide communication under compute, and pay for it: every stage runs twice at half the size, the experts'
weights are read twice, and small kernels do not get faster by half.  The times are measured ones where there are
(`StageTimes` of a calibration), else those of a roofline (`estimate`).  Pure functions: all ranks compute them from the
same headers and agree.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from epmoe.config import ModelConfig
from epmoe.moe.makespan import LAYER, Task, layer_tasks, makespan

LAYERS = 4  # of the graph that is compared; start and end weigh a little more than in a whole model
GAIN = 0.97  # two lanes must promise at least this
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


@lru_cache(maxsize=1024)
def choose_lanes(tokens_W: tuple[int, ...], times: StageTimes) -> int:
    """1 or 2 lanes for a step in which rank w has ``tokens_W[w]`` tokens."""
    if max(tokens_W) < 2:
        return 1
    return 2 if split_time(tokens_W, times) <= GAIN * unsplit_time(tokens_W, times) else 1


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


@dataclass(frozen=True)
class Device:
    """What `estimate` assumes: products and memory in units per microsecond, what leaves a rank, and each stage's
    overhead in microseconds."""

    flops: float
    bytes: float
    link: float
    kernel_us: float
    message_us: float


H200 = Device(flops=550e6, bytes=3.8e6, link=0.34e6, kernel_us=4.0, message_us=15.0)
SIZES = (1, *(2**k for k in range(1, 16)))


def estimate(model: ModelConfig, ranks: int, exact: bool, device: Device = H200) -> StageTimes:
    """Times by roofline: 2-byte weights, balanced routing, attention's own products left out (it does not know how
    long the sequences are)."""
    D, K, F, E = model.hidden_size, model.top_k, model.moe_intermediate_size, model.num_experts
    slots = E / ranks
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    remote = ranks * (1 - (1 - 1 / ranks) ** K) * (ranks - 1) / ranks
    back = K * (ranks - 1) / ranks if exact else remote

    def product(rows: float, weights: float, read: float = 1.0) -> float:
        return max(2 * rows * weights / device.flops, 2 * weights * read / device.bytes)

    def stages(T: int) -> dict[str, float]:
        pairs = T * K / slots  # per slot
        active = 1 - (1 - 1 / E) ** (T * ranks * K)
        shared = 3 * D * (model.shared_intermediate_size or 0)
        return {
            "attention": 6 * device.kernel_us + product(T, D * heads),
            "router": 2 * device.kernel_us + product(T, D * E),
            "shared": (3 * device.kernel_us + product(T, shared)) if shared else 0.0,
            "dispatch": device.message_us + T * remote * 2 * D / device.link,
            "experts": 3 * device.kernel_us + slots * product(pairs, 3 * D * F, active),
            "combine": device.message_us + T * back * 2 * D / device.link,
            "sum": device.kernel_us + T * (K if exact else ranks) * 2 * D / device.bytes,
        }

    found = [stages(T) for T in SIZES]
    return StageTimes.of(SIZES, {stage: [each[stage] for each in found] for stage in found[0]})
