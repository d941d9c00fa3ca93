"""The plan: which rank holds which expert, its file format and its checks.

A plan is ragged: ranks and layers may hold different numbers of experts.  A *slot* is a place for one expert's
weights; a replicated expert has several slots, on distinct ranks.  Router, shared experts and dense layers are on
every rank and are never slots.

File (``epmoe-plan/1``, JSON)::

    {"format": "epmoe-plan/1",
     "model": {"name", "config_sha256", "moe_layers": [model index], "num_experts", "top_k"},
     "ranks": W, "slots": [layer][rank][experts], "replica_rule": "own-copy" | [home][layer][expert] -> rank,
     "affinity": "file.npz" | null, "made_by": text}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import index
from pathlib import Path

import numpy as np

from placement.errors import UserError
from placement.textfiles import parse_json, write_whole

FORMAT = "epmoe-plan/1"
OWN_COPY = "own-copy"


@dataclass(frozen=True)
class MoEShape:
    """What a plan and a trace must agree on with a model.

    ``moe_layers`` are indices of the MoE layers in the model (a dense first layer makes them start at 1).
    ``config_sha256`` may be empty: then only the shape is compared.
    """

    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int
    name: str = ""
    config_sha256: str = ""

    @property
    def num_layers(self) -> int:
        return len(self.moe_layers)

    def require_same(self, other: MoEShape, mine: str, theirs: str) -> None:
        """Raise ``UserError`` where ``other`` is of another model; ``mine``/``theirs`` name the two in the message."""
        for key in ("num_experts", "top_k", "moe_layers", "config_sha256"):
            a, b = getattr(self, key), getattr(other, key)
            if key == "config_sha256" and not (a and b):
                continue
            if a != b:
                raise UserError(
                    f"{theirs} is for another model: its {key} is {_brief(b)}, {mine} has {_brief(a)};"
                    f" record or solve it for {self.name or mine}"
                )


@dataclass(frozen=True)
class Plan:
    """Expert -> rank, for every MoE layer.

    Args:
        shape: the model's MoE shape.
        ranks: W.
        slots: ``slots[layer][rank]`` is the tuple of logical experts held there, in local slot order.
        serve: which rank serves (home rank, layer, expert), int32 ``[W, L, E]``; ``None`` is the default rule:
            the home's own copy if it has one, else copy number ``home % copies`` in ascending rank order.
        affinity: name of an ``.npz`` beside the plan file (``token_rank`` float16 ``[vocabulary, W]`` and
            ``tokenizer_sha256``), or ``None``.
        made_by: which solver made it, for people.
    """

    shape: MoEShape
    ranks: int
    slots: tuple[tuple[tuple[int, ...], ...], ...]
    serve: np.ndarray | None = field(default=None, compare=False)
    affinity: str | None = None
    made_by: str = ""

    def __post_init__(self) -> None:
        _validate(self)

    @cached_property
    def max_slots(self) -> int:
        """Most experts one rank holds in one layer: the stride of a rank in the padded slot numbering."""
        return max(len(held) for layer in self.slots for held in layer)

    @cached_property
    def slot_expert_LS(self) -> np.ndarray:
        """int32 ``[L, W * max_slots]``: slot -> expert, rank-major, -1 where a rank holds fewer experts."""
        table = np.full((self.shape.num_layers, self.ranks, self.max_slots), -1, np.int32)
        for layer, ranks in enumerate(self.slots):
            for rank, held in enumerate(ranks):
                table[layer, rank, : len(held)] = held
        return table.reshape(self.shape.num_layers, -1)

    @cached_property
    def copy_slot_LEW(self) -> np.ndarray:
        """int32 ``[L, E, W]``: (expert, rank) -> local slot of the copy that rank holds, -1 where it holds none."""
        table = np.full((self.shape.num_layers, self.shape.num_experts, self.ranks), -1, np.int32)
        for layer, ranks in enumerate(self.slots):
            for rank, held in enumerate(ranks):
                table[layer, list(held), rank] = np.arange(len(held))
        return table

    @cached_property
    def copies_LE(self) -> np.ndarray:
        """int64 ``[L, E]``: how many ranks hold a copy."""
        return (self.copy_slot_LEW >= 0).sum(-1)

    @cached_property
    def expert_rank_LE(self) -> np.ndarray:
        """int32 ``[L, E]``: the lowest rank that holds the expert (the only one where nothing is replicated)."""
        return (self.copy_slot_LEW >= 0).argmax(-1).astype(np.int32)

    @cached_property
    def serve_rank_WLE(self) -> np.ndarray:
        """int32 ``[W, L, E]``: the rank that serves an expert for tokens of each home rank (the replica rule)."""
        if self.serve is not None:
            return self.serve
        has_LEW = self.copy_slot_LEW >= 0
        by_rank_LEW = np.argsort(~has_LEW, axis=-1, kind="stable")  # holders first, in ascending rank
        table = np.empty((self.ranks, *self.copies_LE.shape), np.int32)
        for home in range(self.ranks):
            nth_LE = home % self.copies_LE
            other_LE = np.take_along_axis(by_rank_LEW, nth_LE[..., None], -1)[..., 0]
            table[home] = np.where(has_LEW[..., home], home, other_LE)
        return table

    def serve_slot_LE(self, home: int) -> np.ndarray:
        """int32 ``[L, E]``: expert -> global slot (``rank * max_slots + local slot``) for tokens of ``home``."""
        rank_LE = self.serve_rank_WLE[home]
        local_LE = np.take_along_axis(self.copy_slot_LEW, rank_LE[..., None].astype(np.int64), -1)[..., 0]
        return (rank_LE * self.max_slots + local_LE).astype(np.int32)

    # -- file ---------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        shape = self.shape
        return json.dumps(
            {
                "format": FORMAT,
                "model": {
                    "name": shape.name,
                    "config_sha256": shape.config_sha256,
                    "moe_layers": list(shape.moe_layers),
                    "num_experts": shape.num_experts,
                    "top_k": shape.top_k,
                },
                "ranks": self.ranks,
                "slots": self.slots,
                "replica_rule": OWN_COPY if self.serve is None else self.serve.tolist(),
                "affinity": self.affinity,
                "made_by": self.made_by,
            }
        )

    @staticmethod
    def from_json(text: str, source: str = "plan") -> Plan:
        """Parse and check; ``source`` names the file in errors."""
        raw = parse_json(text, source, f"expected an {FORMAT} file")
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            found = raw.get("format") if isinstance(raw, dict) else type(raw).__name__
            raise UserError(f"{source}: format is {found!r}, expected {FORMAT!r}; write it with epmoe-placement")
        known = {"format", "model", "ranks", "slots", "replica_rule", "affinity", "made_by"}
        _require_keys(raw, known, source)
        _require_keys(raw["model"], {"name", "config_sha256", "moe_layers", "num_experts", "top_k"}, f"{source}: model")
        try:
            model = raw["model"]
            rule = raw["replica_rule"]
            return Plan(
                shape=MoEShape(
                    tuple(index(i) for i in model["moe_layers"]),
                    index(model["num_experts"]),
                    index(model["top_k"]),
                    str(model["name"]),
                    str(model["config_sha256"]),
                ),
                ranks=index(raw["ranks"]),
                slots=tuple(tuple(tuple(index(e) for e in held) for held in layer) for layer in raw["slots"]),
                serve=None if rule == OWN_COPY else np.asarray(rule, np.int32),
                affinity=None if raw["affinity"] is None else _file_name(raw["affinity"]),
                made_by=str(raw["made_by"]),
            )
        except UserError as error:
            raise UserError(f"{source}: {error}") from None
        except (TypeError, ValueError, OverflowError) as error:
            raise UserError(f"{source}: a field has the wrong type ({error}); expected an {FORMAT} file") from None

    def save(self, path: str | Path) -> None:
        write_whole(path, self.to_json() + "\n")

    @staticmethod
    def load(path: str | Path) -> Plan:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"cannot read plan {path}: {reason}; give a file written by epmoe-placement") from None
        return Plan.from_json(text, str(path))


def make_plan(shape: MoEShape, ranks: int, slots: Sequence[Sequence[Sequence[int]]], **extra) -> Plan:
    """A plan from nested lists ``[layer][rank][experts]``; ``extra`` are further fields of :class:`Plan`."""
    frozen = tuple(tuple(tuple(int(e) for e in held) for held in layer) for layer in slots)
    return Plan(shape, ranks, frozen, **extra)


def plan_from_ranks(shape: MoEShape, ranks: int, expert_rank_LE: np.ndarray, **extra) -> Plan:
    """A plan without replicas from expert -> rank, int ``[L, E]``; experts of a rank are in ascending order."""
    slots = [[np.flatnonzero(row == rank) for rank in range(ranks)] for row in np.asarray(expert_rank_LE)]
    return make_plan(shape, ranks, slots, **extra)


def linear_plan(shape: MoEShape, ranks: int) -> Plan:
    """Contiguous runs of experts, the first ``E % W`` ranks one longer: what engines do without a plan."""
    row = np.repeat(np.arange(ranks), [len(part) for part in np.array_split(np.arange(shape.num_experts), ranks)])
    return plan_from_ranks(shape, ranks, np.tile(row, (shape.num_layers, 1)), made_by="linear")


def round_robin_plan(shape: MoEShape, ranks: int) -> Plan:
    """Expert e on rank ``e % W``."""
    row = np.arange(shape.num_experts) % ranks
    return plan_from_ranks(shape, ranks, np.tile(row, (shape.num_layers, 1)), made_by="round-robin")


def with_shape(plan: Plan, shape: MoEShape) -> Plan:
    """The same slots for a model whose shape agrees (to fill in a name or a config hash)."""
    shape.require_same(plan.shape, "the model", "the plan")
    return replace(plan, shape=shape)


def _validate(plan: Plan) -> None:
    shape, ranks = plan.shape, plan.ranks
    if ranks < 1:
        raise UserError(f"ranks is {ranks}; a plan needs at least 1 rank")
    if shape.num_experts < 1 or not 1 <= shape.top_k <= shape.num_experts:
        raise UserError(f"num_experts {shape.num_experts} and top_k {shape.top_k} must satisfy 1 <= top_k <= experts")
    if len(plan.slots) != shape.num_layers or not plan.slots:
        raise UserError(f"slots has {len(plan.slots)} layers, the model has {shape.num_layers} MoE layers (at least 1)")
    for layer, held_by_rank in enumerate(plan.slots):
        where = f"layer {layer}"
        if len(held_by_rank) != ranks:
            raise UserError(f"{where} lists {len(held_by_rank)} ranks, the plan says {ranks}; list every rank")
        seen: set[int] = set()
        for rank, held in enumerate(held_by_rank):
            if not held:
                raise UserError(f"{where}: rank {rank} holds no expert; give every rank a slot or use fewer ranks")
            for expert in held:
                if not 0 <= expert < shape.num_experts:
                    raise UserError(f"{where}, rank {rank}: expert {expert} is not in 0..{shape.num_experts - 1}")
                seen.add(expert)
            if len(set(held)) != len(held):
                twice = next(e for e in held if held.count(e) > 1)
                raise UserError(f"{where}: rank {rank} holds expert {twice} twice; put replicas on distinct ranks")
        if missing := shape.num_experts - len(seen):
            first = next(expert for expert in range(shape.num_experts) if expert not in seen)
            raise UserError(f"{where}: expert {first} is on no rank ({missing} missing); place every expert")
    if plan.serve is not None:
        _validate_serve(plan)


def _validate_serve(plan: Plan) -> None:
    want = (plan.ranks, plan.shape.num_layers, plan.shape.num_experts)
    if plan.serve.shape != want:
        raise UserError(f"replica_rule has shape {plan.serve.shape}, expected [home, layer, expert] = {want}")
    if plan.serve.min() < 0 or plan.serve.max() >= plan.ranks:
        raise UserError(f"replica_rule names a rank outside 0..{plan.ranks - 1}")
    held_WLE = np.take_along_axis(
        np.moveaxis(plan.copy_slot_LEW, -1, 0), plan.serve.astype(np.int64), axis=0
    )  # [W, L, E]: local slot on the serving rank
    if (held_WLE < 0).any():
        home, layer, expert = np.argwhere(held_WLE < 0)[0]
        raise UserError(
            f"replica_rule: layer {layer}, expert {expert}, home {home} is served by rank"
            f" {plan.serve[home, layer, expert]}, which holds no copy of it"
        )


def _require_keys(raw: object, known: set[str], source: str) -> None:
    if not isinstance(raw, dict):
        raise UserError(f"{source} is {type(raw).__name__}, expected an object with {sorted(known)}")
    if missing := sorted(known - raw.keys()):
        raise UserError(f"{source} lacks {missing}; expected the keys {sorted(known)}")
    if unknown := sorted(raw.keys() - known):
        raise UserError(f"{source} has unknown keys {unknown}; expected only {sorted(known)}")


def _file_name(value: object) -> str:
    if not isinstance(value, str) or not value or len(value.encode()) > 255 or "/" in value or "\0" in value:
        raise UserError(f"affinity must be null or the name of a file beside the plan, got {value!r:.60}")
    return value


def _brief(value: object) -> str:
    if isinstance(value, tuple):
        return f"{len(value)} layers {list(value[:3])}..." if len(value) > 4 else str(list(value))
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 16 else str(value)
