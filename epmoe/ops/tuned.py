"""Tiles that ``epmoe tune`` measured: a small file, and which of them fits a layer and its number of pairs.

``{"format": "epmoe-tuned/1", "cases": [{"device", "experts", "top_k", "hidden", "features", "dtype", "tokens",
"tuned_us", "heuristic_us", "choice"}]}``: one case for each number of tokens that was measured, ``experts`` being the
slots of one rank.  A layer takes the case nearest to it, up to a factor of two in slots and in pairs of a slot; where
there is none, or none of its sizes and device, the choice is left to `epmoe.ops.tiles.choose`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from math import log2

import torch

from epmoe.ops.grouped_gemm import TileConfig
from epmoe.ops.tiles import Choice
from placement.errors import UserError

FORMAT = "epmoe-tuned/1"
REACH = 1.0  # binary orders of magnitude between a layer and the case it takes, in slots and in pairs of a slot


@dataclass(frozen=True)
class TunedCase:
    """The fastest measured tiles of a layer of ``experts`` slots for ``tokens`` rows of ``top_k`` local choices."""

    device: str
    experts: int
    top_k: int
    hidden: int
    features: int
    dtype: str
    tokens: int
    tuned_us: float
    heuristic_us: float
    choice: Choice

    @property
    def key(self) -> tuple:
        """What a newer measurement of the same case replaces."""
        return self.device, self.experts, self.top_k, self.hidden, self.features, self.dtype, self.tokens

    @property
    def pairs_per_slot(self) -> float:
        return self.tokens * self.top_k / self.experts


class Tuned:
    """Measured cases, looked up by layer; what was looked up once is remembered."""

    def __init__(self, cases: Iterable[TunedCase]) -> None:
        self.cases = tuple({case.key: case for case in cases}.values())
        self._found: dict[tuple, Choice | None] = {}

    def choice(self, rows_RD: torch.Tensor, pairs: int, weights) -> Choice | None:
        """Tiles for ``pairs`` pairs over the slots of ``weights``; ``None`` where nothing near was measured."""
        dtype = str(weights.down.dtype).removeprefix("torch.")
        where = (dtype, rows_RD.device.index, *weights.down.shape, pairs, rows_RD.shape[0] == 1)
        if where not in self._found:
            self._found[where] = self.find((torch.cuda.get_device_name(rows_RD.device), dtype), *where[2:])
        return self._found[where]

    def find(
        self, machine: tuple[str, str], slots: int, hidden: int, features: int, pairs: int, one_row: bool
    ) -> Choice | None:
        """``machine``: device name and dtype.  A single row has tiles of its own and takes those of one token only."""
        near = []
        for case in self.cases if pairs else ():
            same = (case.device, case.dtype) == machine and (case.hidden, case.features) == (hidden, features)
            if same and one_row == (case.tokens == 1):
                pairs_apart = abs(log2(pairs / slots / case.pairs_per_slot))
                slots_apart = abs(log2(case.experts / slots))
                if max(pairs_apart, slots_apart) <= REACH:
                    near.append((slots_apart, pairs_apart, case))
        return min(near, key=lambda item: item[:2])[2].choice if near else None

    def merged(self, newer: Iterable[TunedCase]) -> Tuned:
        return Tuned((*self.cases, *newer))

    def to_json(self) -> str:
        lines = ",\n".join(json.dumps(asdict(case)) for case in self.cases)
        return f'{{"format": "{FORMAT}", "cases": [\n{lines}\n]}}\n'

    @staticmethod
    def from_json(text: str, source: str = "tuned tiles") -> Tuned:
        """Raises ``UserError`` where the text is not such a file, or is one of another version's kernels."""
        try:
            raw = json.loads(text)
            if raw["format"] != FORMAT:
                raise ValueError(f"its format is {raw['format']!r}, not {FORMAT!r}")
            return Tuned([_case(item) for item in raw["cases"]])
        except KeyError as error:
            reason = f"it lacks {error}"
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            reason = str(error)
        raise UserError(f"{source} is no file of tuned tiles for this version ({reason}); remove it and run epmoe tune")


def _case(raw: Mapping) -> TunedCase:
    choice = _known(Choice, raw["choice"])
    tiles = {name: TileConfig(**_known(TileConfig, choice[name])) for name in ("gate_up", "down")}
    vector = choice.get("vector")
    choice |= {**tiles, "vector": None if vector is None else tuple(map(tuple, vector))}
    values = _known(TunedCase, raw) | {"choice": Choice(**choice)}
    for name in ("experts", "top_k", "hidden", "features", "tokens"):
        if type(values[name]) is not int or values[name] < 1:
            raise ValueError(f"{name} is {values[name]!r}")
    return TunedCase(**values)


def _known(kind: type, raw: Mapping) -> dict:
    if unknown := sorted(set(raw) - {item.name for item in fields(kind)}):
        raise ValueError(f"unknown settings {unknown}")
    return dict(raw)
