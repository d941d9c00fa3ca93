"""The model on one rank: embedding, layers, final norm and head.

Every rank calls :meth:`Decoder.forward` in every step that any rank has work for, also with zero tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch.nn import functional

from epmoe.model.attention import attend
from epmoe.model.weights import ModelWeights, MoEWeights
from epmoe.model_config import ModelConfig
from epmoe.moe.exchange import Exchange
from epmoe.moe.layer import MoELayer, gated_mlp
from epmoe.moe.overlap import ATTENTION, EMBED, HEAD, MLP, Lane, Step, free_sms, open_travel, run_lanes
from epmoe.moe.timeline import Timeline
from epmoe.ops.attention import AttentionBatch
from epmoe.ops.blas import blas_sms
from epmoe.ops.linear import linear
from epmoe.ops.norm import add_rms_norm
from epmoe.ops.rotary import rotary_table
from epmoe.ops.tuned import Tuned
from placement.plan import Plan


@dataclass(frozen=True)
class Batch:
    """The tokens of one step on this rank (T may be 0).

    Args:
        token_T: int64 token ids.
        attention: positions, cache slots, and lengths of the sequences they belong to.
        sample_rows: int64, the rows whose next token is wanted; ``None`` is every row.
        valid_T: bool, which rows are tokens; the others are padding, which no expert works for.  ``None``: all are.
    """

    token_T: torch.Tensor
    attention: AttentionBatch
    sample_rows: torch.Tensor | None = None
    valid_T: torch.Tensor | None = None


@dataclass(frozen=True)
class Place:
    """A lane's number, its first row in the step, the SMs of its experts (0: all), and what it must hold on to until
    every lane is through (see ``moe.overlap``)."""

    number: int
    first_row: int
    num_sms: int
    held: list


class RoutingObserver(Protocol):
    """Sees every router decision of a lane, once it is through the layers; must not block (see ``epmoe.trace``)."""

    def __call__(self, expert_LTK: torch.Tensor, first_row: int) -> None: ...


class Decoder:
    """Weights, rotary table and exchange of one rank; no state changes between steps but the caller's KV cache."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        plan: Plan,
        exchange: Exchange,
        tiled: bool,
        tuned: Tuned | None = None,
    ) -> None:
        self.config, self.weights, self.exchange, self.tiled = config, weights, exchange, tiled
        device = weights.embed.device
        positions = config.max_position_embeddings
        self.travel = open_travel(exchange)
        self.timeline: Timeline | None = None
        self.rotary = rotary_table(positions, config.rotary_dim, config.rope_theta, weights.embed.dtype).to(device)
        serve_LE = torch.from_numpy(plan.serve_slot_LE(exchange.comm.rank)).to(device)
        self.moe: dict[int, MoELayer] = {}
        for row, index in enumerate(config.moe_layers):
            mlp = weights.layers[index].mlp
            assert isinstance(mlp, MoEWeights), f"layer {index} is listed in moe_layers {config.moe_layers}"
            rule, serve_E = config.router, serve_LE[row]
            self.moe[index] = MoELayer(index, mlp, rule, config.top_k, serve_E, exchange, tiled, tuned)

    @torch.inference_mode()
    def forward(
        self, lanes: Sequence[Batch], cache: torch.Tensor, observe: RoutingObserver | None = None
    ) -> torch.Tensor:
        """Logits ``[sample rows of all lanes, V]`` in the model dtype.

        Args:
            lanes: the step's tokens, as one batch or cut in two (see ``moe.overlap``).
            cache: ``[layers, 2, KVH, blocks, block_size, d]``, this step's keys and values are written to it.
            observe: called once a lane with the choices of its MoE layers, int32 ``[L, T, K]`` (-1 on padding rows),
                and its first row in the step.
        """
        first = [0, *accumulate(len(batch.token_T) for batch in lanes)]
        self.exchange.shares_sms = len(lanes) > 1
        num_sms = free_sms(self.exchange) if len(lanes) > 1 else 0
        places = [Place(n, first[n], num_sms, []) for n in range(len(lanes))]
        stages = [self._lane(place, batch, cache, observe) for place, batch in zip(places, lanes)]
        with blas_sms(num_sms), nullcontext() if self.timeline is None else self.timeline.forward():
            short_turns = self.exchange.waits_for_counts
            logits = run_lanes(stages, self.exchange.comm.at, self.travel, self.timeline, short_turns)
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _lane(
        self, place: Place, batch: Batch, cache: torch.Tensor, observe: RoutingObserver | None
    ) -> Lane[torch.Tensor]:
        """One lane through all layers."""
        config = self.config
        chosen: list[torch.Tensor] = []
        yield Step(EMBED, -1)
        cos_sin = self.rotary[batch.attention.position_T]
        x = functional.embedding(batch.token_T, self.weights.embed)
        residual = torch.zeros_like(x)
        for index, layer in enumerate(self.weights.layers):
            yield Step(ATTENTION, index)
            x, residual = add_rms_norm(x, residual, layer.input_norm, config.rms_norm_eps)
            x = attend(x, layer.attention, cache[index], batch.attention, cos_sin, (config, self.tiled))
            x, residual = add_rms_norm(x, residual, layer.post_norm, config.rms_norm_eps)
            if (moe := self.moe.get(index)) is None:
                yield Step(MLP, index)
                x = gated_mlp(x, layer.mlp, self.tiled)
                continue
            x, expert_TK = yield from moe.stages(x, batch.valid_T, place.number, place.num_sms, place.held)
            chosen.append(expert_TK)
        yield Step(HEAD, -1)
        place.held.extend(chosen)
        if observe is not None:
            expert_LTK = torch.stack(chosen)
            if batch.valid_T is not None:
                expert_LTK = expert_LTK.where(batch.valid_T[:, None], -1)
            observe(expert_LTK, place.first_row)
        if batch.sample_rows is not None:
            x, residual = x[batch.sample_rows], residual[batch.sample_rows]
        x, _ = add_rms_norm(x, residual, self.weights.final_norm, config.rms_norm_eps)
        return linear(x, self.weights.head, tiled=self.tiled)
