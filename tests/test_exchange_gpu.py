"""Exchanges with CUDA tensors: NCCL where every rank has a GPU of its own, gloo and p2p where ranks share one."""

from __future__ import annotations

import os

import padded_cases
import pytest
import torch
from exchange_cases import COMPILED, Case, compiled_cases, home_tokens, layer_plan, run_cases, shape_of, soak
from ranks import RankPool

from epmoe.comm import Comm
from epmoe.moe.exchange import Exchange, Received
from epmoe.moe.open_exchange import open_exchange
from epmoe.ops.padded_answers import pack_answers_triton
from epmoe.ops.padded_rows import pack_rows_triton

pytestmark = pytest.mark.gpu
KINDS = ["alltoall", "padded", "p2p"]
WORLDS = [2, 4, 8]


@pytest.fixture(scope="module")
def gpu_pool():
    if not torch.cuda.is_available():
        pytest.skip("left out: no GPU")
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # ranks may share a GPU
    pools = {}

    def pool(world: int) -> RankPool:
        if world in pools and pools[world].broken:
            pools.pop(world).close()
        if world not in pools:
            pools[world] = RankPool(world, device="cuda")
        return pools[world]

    yield pool
    for opened in pools.values():
        opened.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", WORLDS)
def test_corners_and_random_layers(gpu_pool, world, kind):
    gpu_pool(world).run(run_cases, compiled_cases(world, kind, 8))


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", WORLDS)
def test_many_rounds(gpu_pool, world, kind):
    """A thousand rounds, or as many as ranks that take turns on a GPU get through: three minutes for all nine, once
    their kernels are compiled."""
    limit_s = 1e9 if world <= torch.cuda.device_count() else 180 / 9
    (done,) = set(gpu_pool(world).run(soak, kind, world, 1000, 64, limit_s, timeout_s=600))
    print(f"{kind} on {world} ranks: {done} rounds")
    assert done == 1000 or limit_s < 1e9 and done >= 8 * len(COMPILED)


def one_layer(exchange: Exchange, x_TD, slot_TK, weight_TK, num_slots: int) -> torch.Tensor:
    sending = exchange.dispatch_send(exchange.dispatch_begin(x_TD, slot_TK, weight_TK))
    received, route = exchange.dispatch_end(sending, num_slots)
    return exchange.combine_end(exchange.combine_begin(doubled(received), route))


def doubled(received: Received) -> torch.Tensor:
    """A stand-in for experts without the host: slot l multiplies by l + 2."""
    index = received.index
    pair_M = torch.arange(len(index.row_M), device=index.row_M.device, dtype=torch.int32)
    slot_M = torch.searchsorted(index.offset_L1, pair_M, right=True) - 1
    row_M = index.row_M.clamp(0, max(received.R_cap - 1, 0)).long()
    return received.rows_RD[row_M] * (slot_M + 2)[:, None].to(received.rows_RD.dtype)


def replayed(comm: Comm, case: Case) -> int:
    """A captured layer, replayed with other tokens, equals the exact exchange bit for bit."""
    plan = layer_plan(case, comm.world)
    num_slots, shape = len(plan.slots[0][comm.rank]), shape_of(case, plan)
    exact, tested = open_exchange(comm, shape, "alltoall"), open_exchange(comm, shape, case.exchange)
    if not tested.capturable:
        return 0
    T = max(case.tokens_W)
    static = [torch.zeros((T, case.hidden), dtype=case.dtype, device=comm.device)]
    static.append(torch.full((T, case.top_k), -1, dtype=torch.int32, device=comm.device))
    static.append(torch.zeros((T, case.top_k), device=comm.device))
    tested.begin_step(T)
    for _ in range(2):
        one_layer(tested, *static, num_slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = one_layer(tested, *static, num_slots)
    for number in range(6):
        drawn = Case(**{**vars(case), "seed": case.seed + 100 * number})
        tokens = home_tokens(drawn, plan, comm.rank).to(comm.device)
        n = len(tokens.x_TD)
        static[1].fill_(-1)
        for buffer, new in zip(static, (tokens.x_TD, tokens.slot_TK, tokens.weight_TK)):
            buffer[:n] = new
        tested.begin_step(T)
        graph.replay()
        want = one_layer(exact, tokens.x_TD, tokens.slot_TK, tokens.weight_TK, num_slots)
        assert torch.equal(y[:n], want), f"replay {number} of {case.exchange} differs on rank {comm.rank}"
    return int(tested.traffic().rows_W.sum())


@pytest.mark.parametrize("sizes", COMPILED[:2], ids=lambda sizes: sizes["combine"])
@pytest.mark.parametrize("kind,world", [("padded", 2), *(("p2p", world) for world in WORLDS)])
def test_captured_layers(gpu_pool, kind, world, sizes):
    """Ranks may share a GPU over p2p; over NCCL none can."""
    if kind == "padded" and torch.cuda.device_count() < world:
        pytest.skip("left out: NCCL needs a GPU for each rank")
    tokens_W = (9, 0, 5, 1, 7, 9, 2, 3)[:world]
    case = Case(seed=5, tokens_W=tokens_W, exchange=kind, **sizes)
    rows = gpu_pool(world).run(replayed, case)
    assert all(rows[rank] > 0 for rank, tokens in enumerate(tokens_W) if tokens)


def padded_alone() -> None:
    """One rank's NCCL group: padded is captured and replayed through NCCL itself."""
    import torch.distributed as dist

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29517", rank=0, world_size=1)
    from epmoe.moe.padded import Padded

    comm = Comm(0, 1, device, dist.group.WORLD, None, on_nccl=True)
    case = Case(seed=9, tokens_W=(9,), hidden=64, dtype=torch.bfloat16)
    plan = layer_plan(case, 1)
    tokens = home_tokens(case, plan, 0).to(device)
    args = (tokens.x_TD, tokens.slot_TK, tokens.weight_TK, len(plan.slots[0][0]))
    exchange = Padded(comm, shape_of(case, plan))
    assert exchange.capturable
    want = one_layer(exchange, *args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = one_layer(exchange, *args)
    y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, want)
    dist.destroy_process_group()


def test_padded_is_captured_on_one_rank_of_nccl():
    if not torch.cuda.is_available():
        pytest.skip("left out: no GPU")
    torch.multiprocessing.spawn(_alone, nprocs=1)


def _alone(_: int) -> None:
    padded_alone()


@pytest.mark.parametrize("layout", padded_cases.LAYOUTS)
def test_padded_kernels(layout):
    if not torch.cuda.is_available():
        pytest.skip("left out: no GPU")
    for tokens in (0, 1, 7, 300):
        padded_cases.check_pack_rows(pack_rows_triton, layout, tokens, "cuda")
    if not layout.reduce:
        padded_cases.check_pack_answers(pack_answers_triton, layout, "cuda")
