"""The expert index against loops over pairs."""

import moe_cases
import torch

from epmoe.ops.block_schedule import block_schedule_ref, max_blocks
from epmoe.ops.moe_index import build_index


def test_index():
    torch.manual_seed(0)
    moe_cases.check_index(build_index, "cpu")


def test_example_of_the_docstring():
    index = build_index(torch.tensor([[1, -1], [0, 1], [1, 0]], dtype=torch.int32), 2)
    assert index.offset_L1.tolist() == [0, 2, 5]
    assert index.row_M[:5].tolist() == [1, 2, 0, 1, 2]
    assert index.pos_RK.tolist() == [[2, -1], [0, 3], [4, 1]]
    blocks = block_schedule_ref(index.offset_L1, 2, 6)
    assert blocks.offset_L1.tolist() == [0, 1, 3]
    assert blocks.slot_B.tolist() == [0, 1, 1, 2, 2]


def test_the_last_block_of_a_slot_may_hold_a_tail():
    offset_L1 = torch.tensor([0, 0, 1, 11, 22, 26], dtype=torch.int32)  # 0, 1, 10, 11 and 4 pairs
    blocks = block_schedule_ref(offset_L1, 4, 26, tail=2)
    assert blocks.offset_L1.tolist() == [0, 0, 1, 3, 6, 7]  # 10 = 4 + 6; 11 = 4 + 4 + 3


def test_the_bound_on_blocks_is_never_passed():
    for _ in range(50):
        num_slots, rows = int(torch.randint(1, 9, ())), int(torch.randint(1, 6, ()))
        count_L = torch.randint(0, 12, (num_slots,))
        assert int(((count_L + rows - 1) // rows).sum()) <= max_blocks(int(count_L.sum()), num_slots, rows)
