"""What p2p says and reserves before any rank exists."""

import os
import threading
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from drive import Script, drive
from p2p_cases import Case, lockstep_ranks
from tiny_checkpoints import save_tiny

from epmoe.comm import Comm, PeerMemory
from epmoe.model.decoder import Decoder
from epmoe.moe.by_size import Cost, wire_bytes
from epmoe.moe.exchange import LANES, ExchangeShape
from epmoe.moe.p2p import PeerFailed, buffer_size, first_copied, lane_layout, p2p_unavailable
from epmoe.ops.p2p_signal import ABORT, ABORTED, GONE, RECORD, Failure, read_failure
from launch.env import SHARED_GPU_MEMORY, allow_shared_gpus, child_environment

SHAPE = ExchangeShape(4, 128, 256, 4, torch.bfloat16, "exact")


@pytest.mark.parametrize(
    "world,device,change,why",
    [
        (8, "cpu", {}, "needs GPUs, this run is on cpu"),
        (64, "cuda", {}, "up to 63 ranks, this run has 64"),
        (8, "cuda", {"max_tokens": 65536}, "up to 65535 tokens a rank, the budget is 65536"),
        (8, "cuda", {"hidden": 100}, "16 bytes at a time, a row has 200"),
    ],
)
def test_a_run_that_p2p_cannot_serve_is_told_why(world, device, change, why):
    assert why in p2p_unavailable(Comm(0, world, torch.device(device)), replace(SHAPE, **change))


def test_a_run_that_p2p_can_serve():
    assert p2p_unavailable(Comm(0, 63, torch.device("cuda")), replace(SHAPE, max_tokens=65535)) is None


@pytest.mark.parametrize("combine,answers", [("exact", 4), ("reduce", 3)])
def test_buffers_hold_the_whole_budget_from_every_rank(combine, answers):
    """All tokens of all ranks to this one, and all answers of its own, in both lanes: no step can exceed that."""
    shape = replace(SHAPE, combine=combine)
    layout = lane_layout(3, shape)
    assert layout.sizes["rows"] == 3 * 128 * 512
    assert layout.sizes["weight"] == (3 * 128 * 4 * 4 if combine == "reduce" else 0)
    assert layout.sizes["returned"] == 128 * answers * 512
    ends = [layout.at(name) + size for name, size in layout.sizes.items()]
    assert all(end <= start for end, start in zip(ends, [*layout.starts.values()][1:]))
    assert layout.total >= ends[-1] and buffer_size(3, shape) == LANES * layout.total


@pytest.mark.parametrize("layer", [-1, 0, 57])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_record_says_where_and_for_whom(layer, stage):
    word = 1 << 63 | 123456 << 32 | (layer + 1) << 16 | stage << 14 | 1 << 12 | 62
    failure = read_failure(word - (1 << 64))  # as a signed word of host memory
    assert (failure.step, failure.layer, failure.stage, failure.peer) == (
        123456,
        layer,
        ("dispatch", "combine", "counts")[stage],
        62,
    )
    assert read_failure(0) is None
    gone = str(Failure(3, layer, "combine", 1, GONE))
    assert gone.startswith("step 3") and "combine: rank 1 is gone" in gone and ("layer" in gone) == (layer >= 0)


@pytest.mark.parametrize("gone,peer", [([1], 1), ([0, 1], 1), ([0], 0)])
def test_of_several_that_ended_the_one_waited_for_is_named(monkeypatch, gone, peer):
    """Ranks end one after another once the first has; one that is still there may wait for it in turn."""
    exchange = lockstep_ranks(Case(3, 2, 2, 2, 16, 2, torch.float32, False))[2]
    monkeypatch.setattr(PeerMemory, "gone", lambda memory: gone)
    exchange.watch_peers()
    assert exchange.host[ABORT] == 1 and exchange.failure() is None
    exchange.host[RECORD] = (1 << 63 | 4 << 32 | 3 << 16 | 1 << 14 | ABORTED << 12 | 1) - (1 << 64)
    with pytest.raises(PeerFailed, match=f"step 4, layer 2, combine: rank {peer} is gone"):
        exchange.raise_if_failed()


@pytest.mark.parametrize("stage,named", [("agree", True), ("experts", False)])
def test_where_ends_of_processes_do_not_show_a_broken_agreement_names_the_peer(monkeypatch, stage, named):
    """As in containers that hide their neighbours.  A rank's own error, at another stage, is not a peer's."""
    exchange = lockstep_ranks(Case(3, 2, 2, 2, 16, 2, torch.float32, False))[2]
    monkeypatch.setattr(PeerMemory, "gone", lambda memory: [])
    exchange.comm.at.stage = stage
    done = threading.Event()

    def device() -> None:
        while not done.wait(0.01):
            if exchange.host[ABORT]:
                exchange.host[RECORD] = (1 << 63 | 4 << 32 | 3 << 16 | ABORTED << 12 | 1) - (1 << 64)

    thread = threading.Thread(target=device)
    thread.start()
    try:
        with pytest.raises(PeerFailed, match="step 4, layer 2, dispatch: rank 1 was") if named else nullcontext():
            exchange.raise_if_failed(patience_s=0.1)
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize(
    "tokens,graph_tokens,copied", [(4096, 0, True), (4095, 0, False), (4096, 4096, False), (5000, 4096, True)]
)
def test_large_steps_are_copied_unless_a_graph_may_hold_them(tokens, graph_tokens, copied):
    exchange = lockstep_ranks(Case(2, 1, 5000, 1, 16, 1, torch.float16, False))[0]
    exchange.shape = replace(exchange.shape, graph_tokens=graph_tokens)
    exchange.begin_step(tokens)
    assert exchange.waits_for_counts == copied  # which a graph cannot
    assert exchange.ctas == (0 if copied else 16)


def test_costs_decide_from_which_size_rows_are_copied():
    shape = replace(SHAPE, max_tokens=10_000)
    assert first_copied(4, shape, {}) == first_copied(4, shape, {"p2p": Cost(30, 260)}) == 4096
    costs = {"put": Cost(30, 200), "copy": Cost(100, 400)}
    first = first_copied(4, shape, costs)
    for tokens, copied in ((first - 1, False), (first, True), (10_000, True)):
        wire = wire_bytes("p2p", shape, 4, tokens)
        assert (costs["copy"].us(wire) <= costs["put"].us(wire)) == copied
    assert first_copied(4, shape, {"put": Cost(30, 300), "copy": Cost(100, 300)}) == 10_001
    assert first_copied(4, shape, {"put": Cost(30, 300), "copy": Cost(20, 400)}) == 1


def test_ranks_may_share_memory_of_gpus_with_one_number(monkeypatch):
    monkeypatch.delenv(SHARED_GPU_MEMORY, raising=False)
    assert child_environment(1)[SHARED_GPU_MEMORY] == "1"
    allow_shared_gpus()
    assert os.environ[SHARED_GPU_MEMORY] == "1"
    monkeypatch.setenv(SHARED_GPU_MEMORY, "0")  # the user's word stands
    allow_shared_gpus()
    assert os.environ[SHARED_GPU_MEMORY] == child_environment(1)[SHARED_GPU_MEMORY] == "0"


def steps_of(comm: Comm, config: dict) -> list[tuple[int, bool]]:
    """The lanes of each forward pass, and what the exchange was told."""
    seen, forward = set(), Decoder.forward

    def watched(self, lanes, *args):
        logits = forward(self, lanes, *args)
        seen.add((len(lanes), self.exchange.shares_sms))
        return logits

    Decoder.forward = watched
    try:
        prompts = [(n, [5, 6, 7 + n], {"temperature": 0.0, "max_tokens": 3}) for n in range(4)]
        drive(comm, config, Script(prompts))
    finally:
        Decoder.forward = forward
    return sorted(seen)


@pytest.mark.parametrize("overlap,steps", [("on", [(2, True)]), ("off", [(1, False)])])
def test_the_exchange_is_told_whether_another_lane_computes(tmp_path, rank_pool, overlap, steps):
    model = str(save_tiny(tmp_path, "mixtral"))
    config = {"model": model, "ranks": 2, "max_model_len": 64, "overlap": overlap, "exchange": "auto"}
    assert rank_pool(2).run(steps_of, config) == [steps] * 2
