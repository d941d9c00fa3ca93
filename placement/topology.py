"""The machine a plan is solved for: GPUs, their speed and memory, and the links between them.

File (JSON, written by hand or by a measurement)::

    {"format": "epmoe-topology/1", "ranks": W, "speed": [W], "node": [W], "slots": [W] | null,
     "bandwidth": [W][W] bytes/s, "latency": [W][W] seconds}

The diagonal of both matrices is ignored: a row that stays on its rank costs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from placement.errors import UserError
from placement.textfiles import parse_json, write_whole

FORMAT = "epmoe-topology/1"
NVLINK = 4.5e11  # bytes/s of one direction between two GPUs of a node where nothing is measured
NETWORK = 5.0e10  # bytes/s of one direction between two GPUs of different nodes
EXTREME = 1e6  # no GPU's speed is further than this factor from the usual 1
NVLINK_LATENCY, NETWORK_LATENCY = 2e-6, 10e-6


@dataclass(frozen=True, eq=False)
class Topology:
    """W GPUs.

    Args:
        ranks: W.
        speed_W: float64, relative speed of each GPU on expert work (1 is usual; 2 is twice as fast).
        bandwidth_WW: float64, bytes/s from the row's GPU to the column's.
        latency_WW: float64, seconds of one message.
        node_W: int64, the node of each GPU.
        slots_W: int64, expert slots of each GPU in every layer; ``None`` leaves it to the problem (equal shares).
    """

    ranks: int
    speed_W: np.ndarray
    bandwidth_WW: np.ndarray
    latency_WW: np.ndarray
    node_W: np.ndarray
    slots_W: np.ndarray | None = None

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def share_W(self) -> np.ndarray:
        """float64: the share of all work each GPU should get, proportional to its speed; sums to 1."""
        return self.speed_W / self.speed_W.sum()

    @property
    def is_uniform(self) -> bool:
        """Every GPU equally fast and every link alike: relabelling GPUs changes nothing."""
        off = ~np.eye(self.ranks, dtype=bool)
        links = (self.bandwidth_WW[off], self.latency_WW[off])
        same_slots = self.slots_W is None or np.ptp(self.slots_W) == 0
        return same_slots and np.ptp(self.speed_W) == 0 and all(x.size == 0 or np.ptp(x) == 0 for x in links)

    def to_json(self) -> str:
        return json.dumps(
            {
                "format": FORMAT,
                "ranks": self.ranks,
                "speed": self.speed_W.tolist(),
                "node": self.node_W.tolist(),
                "slots": None if self.slots_W is None else self.slots_W.tolist(),
                "bandwidth": np.where(np.eye(self.ranks, dtype=bool), 0, self.bandwidth_WW).tolist(),
                "latency": np.where(np.eye(self.ranks, dtype=bool), 0, self.latency_WW).tolist(),
            }
        )

    @staticmethod
    def from_json(text: str, source: str = "topology") -> Topology:
        raw = parse_json(text, source, f"expected an {FORMAT} file")
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            found = raw.get("format") if isinstance(raw, dict) else type(raw).__name__
            raise UserError(f"{source}: format is {found!r}, expected {FORMAT!r}")
        known = {"format", "ranks", "speed", "node", "slots", "bandwidth", "latency"}
        if raw.keys() != known:
            raise UserError(f"{source} has the keys {sorted(raw)}, expected exactly {sorted(known)}")
        try:
            slots = raw["slots"]
            return Topology(
                int(raw["ranks"]),
                np.asarray(raw["speed"], np.float64),
                np.asarray(raw["bandwidth"], np.float64),
                np.asarray(raw["latency"], np.float64),
                np.asarray(raw["node"], np.int64),
                None if slots is None else np.asarray(slots, np.int64),
            )
        except UserError as error:
            raise UserError(f"{source}: {error}") from None
        except (TypeError, ValueError, OverflowError) as error:
            raise UserError(f"{source}: a field has the wrong type ({error}); expected an {FORMAT} file") from None

    def save(self, path: str | Path) -> None:
        write_whole(path, self.to_json() + "\n")

    @staticmethod
    def load(path: str | Path) -> Topology:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"cannot read topology {path}: {reason}; give an {FORMAT} JSON file") from None
        return Topology.from_json(text, str(path))


MOST_GPUS = 4096  # bandwidths are W x W


def uniform(
    ranks: int,
    *,
    speed: Sequence[float] | None = None,
    slots: Sequence[int] | None = None,
    bandwidth: float = NVLINK,
    latency: float = NVLINK_LATENCY,
) -> Topology:
    """One node: every link ``bandwidth`` bytes/s and ``latency`` seconds; speeds and slots may differ by GPU."""
    return two_level(1, ranks, speed=speed, slots=slots, intra=(bandwidth, latency))


def two_level(
    nodes: int,
    gpus_per_node: int,
    *,
    speed: Sequence[float] | None = None,
    slots: Sequence[int] | None = None,
    intra: tuple[float, float] = (NVLINK, NVLINK_LATENCY),
    inter: tuple[float, float] = (NETWORK, NETWORK_LATENCY),
) -> Topology:
    """``nodes`` x ``gpus_per_node`` GPUs, node-major; ``intra`` and ``inter`` are (bytes/s, seconds) of a link."""
    if nodes < 1 or gpus_per_node < 1 or nodes * gpus_per_node > MOST_GPUS:
        raise UserError(f"{nodes} nodes x {gpus_per_node} GPUs: both must be at least 1, together at most {MOST_GPUS}")
    ranks = nodes * gpus_per_node
    node_W = np.repeat(np.arange(nodes), gpus_per_node)
    same_WW = node_W[:, None] == node_W
    return Topology(
        ranks,
        np.ones(ranks) if speed is None else np.asarray(speed, np.float64),
        np.where(same_WW, float(intra[0]), float(inter[0])),
        np.where(same_WW, float(intra[1]), float(inter[1])),
        node_W,
        None if slots is None else np.asarray(slots, np.int64),
    )


def _validate(topology: Topology) -> None:
    W = topology.ranks
    if W < 1:
        raise UserError(f"topology has {W} GPUs; it needs at least 1")
    for name in ("speed_W", "node_W", "slots_W", "bandwidth_WW", "latency_WW"):
        value = getattr(topology, name)
        want = (W, W) if name.endswith("WW") else (W,)
        if value is not None and value.shape != want:
            raise UserError(f"topology: {name[: name.rindex('_')]} has shape {value.shape}, {W} GPUs need {want}")
    if not ((topology.speed_W >= 1 / EXTREME) & (topology.speed_W <= EXTREME)).all():  # also refuses NaN
        raise UserError(
            f"topology: speeds must be from {1 / EXTREME:g} to {EXTREME:g}, got {topology.speed_W.tolist()}"
        )
    if topology.slots_W is not None and topology.slots_W.min() < 1:
        raise UserError(f"topology: GPU {topology.slots_W.argmin()} has {topology.slots_W.min()} slots; each needs 1")
    off = ~np.eye(W, dtype=bool)
    if not ((topology.bandwidth_WW[off] >= 1) & np.isfinite(topology.bandwidth_WW[off])).all():
        raise UserError("topology: every bandwidth between two GPUs must be a number of at least 1 (bytes/s)")
    if not (np.isfinite(topology.latency_WW[off]) & (topology.latency_WW[off] >= 0)).all():
        raise UserError("topology: every latency between two GPUs must be 0 or more seconds")
