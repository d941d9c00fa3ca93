"""A model of random weights that routes as recorded: for the fourth part of multi_gpu_report.py.

A token's id is its row in the recording: the router computes what it always does, then its choice is replaced by the
recorded one, and the token drawn after row t is row t + 1.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from model_bench_lib import QWEN3_30B

from epmoe.engine.engine import Engine
from epmoe.model.decoder import Decoder
from epmoe.moe.layer import MoELayer, Routing
from placement.trace import Trace

REHEARSAL = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 256,
             "moe_intermediate_size": 64, "intermediate_size": 64}  # fmt: skip


@dataclass(frozen=True)
class ReplayLayer(MoELayer):
    """Routes as recorded: ``expert_VK`` int32, this layer's choices by recorded row.

    ``rows``: the lanes' tokens (recorded rows) in the present step, one list for all layers; ``row_T``: one lane's.
    """

    expert_VK: torch.Tensor | None = None
    rows: list[torch.Tensor] = field(default_factory=list)
    row_T: torch.Tensor | None = None

    def stages(self, x_TD: torch.Tensor, valid_T: torch.Tensor | None, lane: int, *rest):
        return MoELayer.stages(replace(self, row_T=self.rows[lane]), x_TD, valid_T, lane, *rest)

    def route(self, x_TD: torch.Tensor, valid_T: torch.Tensor | None = None) -> Routing:
        computed = super().route(x_TD, valid_T)
        expert_TK = self.expert_VK[self.row_T]
        slot_TK = self.serve_slot_E[expert_TK.long()]
        if valid_T is not None:
            slot_TK = slot_TK.where(valid_T[:, None], -1)
        return Routing(computed.weight_TK, expert_TK, slot_TK)


class ReplayDecoder(Decoder):
    """Takes routing and the next token from a recording; everything else is computed."""

    @torch.inference_mode()
    def forward(self, lanes, cache, observe=None) -> torch.Tensor:
        next(iter(self.moe.values())).rows[:] = [batch.token_T for batch in lanes]
        logits = super().forward(lanes, cache, observe)
        after = [batch.token_T if batch.sample_rows is None else batch.token_T[batch.sample_rows] for batch in lanes]
        return logits.scatter_(1, (torch.cat(after) + 1)[:, None] % logits.shape[1], 1e4)


def model_folder(trace: Trace, rehearse: bool) -> str:
    """config.json of Qwen3-30B-A3B's attention and experts, with the recording's layers, experts and choices."""
    L, E, K = trace.shape.num_layers, trace.shape.num_experts, trace.shape.top_k
    values = QWEN3_30B | {"num_hidden_layers": L, "num_experts": E, "num_experts_per_tok": K}
    if rehearse:
        values |= REHEARSAL | {"vocab_size": trace.num_tokens}
    folder = Path(tempfile.mkdtemp(prefix="replayed-"))
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


def replay(engine: Engine, trace: Trace) -> None:
    """Make an engine's decoder replay a recording."""
    decoder = engine.runner.decoder
    decoder.__class__ = ReplayDecoder
    expert_LVK = torch.from_numpy(trace.expert_ids_TLK.astype(np.int32)).transpose(0, 1).contiguous()
    expert_LVK = torch.cat([expert_LVK, expert_LVK[:, :1]], 1).to(engine.comm.device)  # the row behind the last
    rows: list[torch.Tensor] = []
    for row, (index, layer) in enumerate(decoder.moe.items()):
        values = {name: getattr(layer, name) for name in layer.__dataclass_fields__}
        decoder.moe[index] = ReplayLayer(**values, expert_VK=expert_LVK[row], rows=rows)
