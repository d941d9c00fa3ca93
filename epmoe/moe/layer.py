"""One MoE layer: route | dispatch | experts | combine."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial

import torch

from epmoe.model.weights import DenseMLP, MoEWeights
from epmoe.moe.exchange import Exchange, Received
from epmoe.moe.overlap import ARRIVE, COMBINE, DISPATCH, EXPERTS, ROUTER, SEND, SHARED, SUM, Step
from epmoe.ops.activation import sigmoid, silu
from epmoe.ops.combine import weighted_sum
from epmoe.ops.experts import ExpertOptions, expert_mlp, expert_sum_of_one
from epmoe.ops.experts_fp8 import expert_mlp_fp8
from epmoe.ops.linear import linear
from epmoe.ops.moe_index import build_index
from epmoe.ops.router import RouterRule, route_to_slots
from epmoe.ops.tuned import Tuned


@dataclass(frozen=True)
class Routing:
    """The router's choice: weights float32 ``[T, K]``, logical experts and global slots int32 ``[T, K]``."""

    weight_TK: torch.Tensor
    expert_TK: torch.Tensor
    slot_TK: torch.Tensor


@dataclass(frozen=True)
class MoELayer:
    """What a MoE layer is besides its input.

    Args:
        index: its number in the model.
        weights: router, this rank's experts, shared experts.
        rule: how scores become choices and weights.
        serve_slot_E: int32 ``[E]``, the global slot that serves each expert for tokens of this home rank.
        exchange: the way to the other ranks.
        tiled: row-invariant arithmetic (deterministic mode).
        tuned: measured kernel tiles.
    """

    index: int
    weights: MoEWeights
    rule: RouterRule
    top_k: int
    serve_slot_E: torch.Tensor
    exchange: Exchange
    tiled: bool
    tuned: Tuned | None = None

    def route(self, x_TD: torch.Tensor, valid_T: torch.Tensor | None = None) -> Routing:
        """``valid_T``: bool, rows that are tokens; a row of padding gets slots of -1 and is sent nowhere."""
        weights = self.weights
        if self.rule.float32_logits:
            router_ED = weights.router.float()  # the input's cast lies between: see `linear_vector_triton`
            logits_TE = linear(x_TD.float(), router_ED, weights.router_bias, tiled=self.tiled)
        else:
            logits_TE = linear(x_TD, weights.router, weights.router_bias, tiled=self.tiled)
        where = (self.serve_slot_E, valid_T)
        return Routing(*route_to_slots(logits_TE, self.rule, self.top_k, weights.correction_bias, where))

    def experts(self, received: Received, num_sms: int = 0) -> torch.Tensor:
        """Unweighted outputs ``[M, D]`` of this rank's experts, in pair order, or their sums ``[R, D]`` if those are
        asked for; ``num_sms``: see ``ExpertOptions``."""
        likely = received.M_likely
        options = ExpertOptions(num_sms=num_sms, deterministic=self.tiled, tuned=self.tuned, likely=likely)
        rows_RD, slot_RK, weights = received.rows_RD, received.slot_RK, self.weights.experts
        run = expert_mlp if weights.down_scale is None else expert_mlp_fp8
        if slot_RK is None:
            return run(rows_RD, received.index, weights, options)
        if run is expert_mlp:
            return expert_sum_of_one(rows_RD, slot_RK, weights, received.weight_RK, options)
        index = build_index(slot_RK, weights.down.shape[0])
        return weighted_sum(run(rows_RD, index, weights, options), index.pos_RK, received.weight_RK)

    def shared(self, x_TD: torch.Tensor) -> torch.Tensor | None:
        """Output of the shared experts, which every rank computes for its own tokens; ``None`` without any."""
        weights = self.weights
        if weights.shared is None:
            return None
        out_TD = gated_mlp(x_TD, weights.shared, self.tiled)
        if weights.shared_gate is not None:
            out_TD = sigmoid(linear(x_TD, weights.shared_gate, tiled=self.tiled), tiled=self.tiled) * out_TD
        return out_TD

    def stages(
        self, x_TD: torch.Tensor, valid_T: torch.Tensor | None, lane: int, num_sms: int, held: list
    ) -> Generator[Step, None, tuple[torch.Tensor, torch.Tensor]]:
        """The layer's output ``[T, D]`` and the choices ``expert_TK`` of one lane (see ``moe.overlap``).

        Args:
            num_sms: for the experts, see ``ExpertOptions``.
            held: of the lane: keeps this layer's tensors of the travel stream until the next layer's dispatch.
        """
        exchange, step = self.exchange, partial(Step, layer=self.index)
        yield step(ROUTER)
        routing = self.route(x_TD, valid_T)
        yield step(DISPATCH)
        held.clear()
        sending = exchange.dispatch_begin(x_TD, routing.slot_TK, routing.weight_TK, lane)
        if not exchange.waits_for_counts:
            sending = exchange.dispatch_send(sending)
        yield step(SHARED)
        shared_TD = self.shared(x_TD)
        if exchange.waits_for_counts:
            yield step(SEND)
            sending = exchange.dispatch_send(sending)
        yield step(ARRIVE)
        received, way_back = exchange.dispatch_end(sending, self.weights.experts.down.shape[0])
        yield step(EXPERTS)
        out_MD = self.experts(received, num_sms)
        yield step(COMBINE)
        returning = exchange.combine_begin(out_MD, way_back)
        yield step(SUM)
        held += [routing, sending, received, way_back, returning]
        return exchange.combine_end(returning, shared_TD), routing.expert_TK


def gated_mlp(x_TD: torch.Tensor, weights: DenseMLP, tiled: bool) -> torch.Tensor:
    """``down(silu(gate(x)) * up(x))``: a dense layer or the shared experts."""
    gate_TF, up_TF = linear(x_TD, weights.gate_up, tiled=tiled).chunk(2, -1)
    return linear(silu(gate_TF, tiled=tiled) * up_TF, weights.down, tiled=tiled)
