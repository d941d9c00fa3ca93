"""The p2p protocol on CPU: its kernels through Triton's interpreter, all ranks in one launch a stage."""

import pytest
import torch
from p2p_cases import Case, VirtualExchange, inputs, reference
from triton import knobs

from epmoe.ops.p2p_layout import DISPATCH
from epmoe.ops.p2p_ranks import PutOptions

pytestmark = pytest.mark.skipif(not knobs.runtime.interpret, reason="run by scripts/test with TRITON_INTERPRET=1")
CASES = [  # the interpreter cuts bfloat16 instead of rounding, so sums are of other types
    Case(1, 3, 3, 2, 16, 4, torch.float32, False),
    Case(2, 5, 8, 2, 32, 3, torch.bfloat16, False),
    Case(3, 4, 4, 3, 24, 2, torch.float32, True),
    Case(4, 0, 2, 2, 16, 2, torch.float16, True),
    Case(5, 2, 3, 3, 16, 1, torch.float32, False),
    Case(6, 2, 2, 3, 16, 1, torch.float16, True),
    Case(2, 9, 10, 2, 7168, 2, torch.bfloat16, False),  # wide rows: smaller tiles
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_round_gives_the_reference(case):
    exchange = VirtualExchange(case)
    exchange.poison()
    for seed in range(2):
        x, slot, weight = inputs(case, seed, only=1 % case.world if seed == 1 else None)
        y = exchange.round(x, slot, weight)
        assert torch.equal(y, reference(case, x, slot, weight)), f"round {seed}"
        assert exchange.failure() is None


@pytest.mark.parametrize("reduce", [False, True])
def test_programs_without_rows_of_their_own_take_part(reduce):
    case = Case(2, 5, 8, 2, 32, 3, torch.float32, reduce)
    exchange = VirtualExchange(case, options=PutOptions(programs=24))
    exchange.poison()
    data = inputs(case, 4)
    assert torch.equal(exchange.round(*data), reference(case, *data))
    assert exchange.failure() is None


def test_a_missing_signal_is_recorded_with_its_place_and_ends_all_later_waits():
    case = CASES[1]
    exchange = VirtualExchange(case)
    exchange.set_step(41)
    exchange.wait(DISPATCH)  # nobody sent
    failure = exchange.failure()
    assert (failure.step, failure.layer, failure.stage, failure.peer) == (41, 7, "dispatch", 0)
    assert "step 41, layer 7, dispatch: rank 0" in str(failure)
    exchange.wait(DISPATCH)
    assert exchange.failure() == failure


def test_the_peer_that_is_late_is_the_one_named():
    case = Case(3, 2, 2, 2, 16, 2, torch.float32, False)
    exchange = VirtualExchange(case)
    x, slot, weight = inputs(case, 0)
    exchange.dispatch(x, slot, weight)
    for buffer in exchange.buffers:
        exchange.layout.view(buffer, "signal", torch.int64, 3, case.world)[0, 2] = 0
    exchange.wait(DISPATCH)
    assert exchange.failure().peer == 2


def test_the_abort_word_ends_a_wait():
    exchange = VirtualExchange(CASES[1])
    exchange.host[0] = 1
    exchange.wait(DISPATCH)
    assert "aborted" in str(exchange.failure())


def test_ranks_that_disagree_about_the_bound_are_named():
    case = CASES[1]
    exchange = VirtualExchange(case)
    x, slot, weight = inputs(case, 0)
    exchange.dispatch(x, slot, weight, case.bound - 1)
    exchange.wait(DISPATCH)
    assert "another size" in str(exchange.failure())


def test_epochs_wrap_at_32_bits():
    case = CASES[1]
    exchange = VirtualExchange(case)
    for buffer in exchange.buffers:
        exchange.layout.view(buffer, "state", torch.int64, 16)[:6] = 2**32 - 2
        exchange.layout.view(buffer, "signal", torch.int64, 3, 2)[:] = -2 << 32
    for seed in range(4):
        x, slot, weight = inputs(case, seed)
        assert torch.equal(exchange.round(x, slot, weight), reference(case, x, slot, weight))
        assert exchange.failure() is None
