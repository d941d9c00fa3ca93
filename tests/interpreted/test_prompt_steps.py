"""Steps of prompts on the buffers of a graph give the logits of ordinary ones, under Triton's interpreter (what a graph
captures; the capture itself needs a GPU)."""

from __future__ import annotations

import pytest
import torch
from drive import Script, drive
from tiny_checkpoints import save_tiny
from triton import knobs

from epmoe.comm import Comm
from epmoe.engine.agreement import Kind, padded_size, prompt_sizes
from epmoe.engine.graphs import Parts
from epmoe.engine.prompt_graphs import PromptGraphs
from epmoe.engine.runner import Runner
from epmoe.engine.staging import views
from epmoe.model import attention
from epmoe.ops.attention_kernels import paged_attention_triton
from epmoe.ops.qkv import split_qkv_triton

pytestmark = pytest.mark.skipif(not knobs.runtime.interpret, reason="run by scripts/test with TRITON_INTERPRET=1")


def test_lanes_with_padding_give_the_same_logits(tmp_path, monkeypatch):
    """Prompts, chunks and decodes, in one lane and in two; keys and values are written by both ways alike."""
    forward, compared = Runner.forward, []

    def both_ways(runner, chunks, kind):
        ran = forward(runner, chunks, kind)
        parts = Parts(runner.decoder, runner.cache, runner.engine, None, runner.last_token, runner.staging)
        static = PromptGraphs(parts)
        total = sum(chunk.count for chunk in chunks)
        size = padded_size(total, prompt_sizes(runner.engine.max_batch_tokens))
        with monkeypatch.context() as patch:
            patch.setattr(attention, "paged_attention", in_place(paged_attention_triton))
            patch.setattr(attention, "split_qkv", split_qkv_triton)
            patch.setattr(static.staging, "refill", refill)
            for lanes in (1, 2):
                kind = Kind(lanes, -(-size // lanes), prompt=True)
                at = static._open(kind.lanes, kind.tokens)
                drawn = static._fill(at, chunks)
                runner.decoder.exchange.begin_step(kind.tokens)
                static._step(at)
                torch.testing.assert_close(static._drawn_from(drawn), ran.logits_NV, rtol=0, atol=1e-4)
                compared.append((lanes, total, len(ran.logits_NV)))
        return ran

    monkeypatch.setattr(Runner, "forward", both_ways)
    model = str(save_tiny(tmp_path, "qwen2_moe", num_experts=6, top_k=2, num_hidden_layers=2))
    config = {"model": model, "max_model_len": 64, "num_blocks": 16, "max_batch_tokens": 32, "max_requests": 4}
    prompts = [list(range(9, 9 + length)) for length in (40, 1, 7)]
    requests = [(n, prompt, {"temperature": 0.0, "max_tokens": 3}) for n, prompt in enumerate(prompts)]
    drive(Comm(0, 1, torch.device("cpu")), config, Script(requests, arrive={2: 2}))
    assert {(lanes, total) for lanes, total, _ in compared} >= {(1, 32), (2, 32)} and len(compared) >= 8


def in_place(kernel):
    return lambda q, cache, batch, scale, *, tiled=False: kernel(q, cache, batch, scale, tiled)


def refill(buffer: torch.Tensor, arrays) -> None:
    for view, array in zip(views(buffer, arrays), arrays):
        view.copy_(torch.from_numpy(array))
