"""The block pool against a plain model of it: who holds what, and what a prefix finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_config import QWEN3

from epmoe.config import EngineConfig
from epmoe.engine.kv_cache import BlockPool, size_cache
from epmoe.engine.request import Request, SamplingParams
from epmoe.hf_config import normalise
from epmoe.model_config import model_config
from placement.errors import UserError

SIZE = 4


def request(tokens: list[int], blocks: list[int] = (), computed: int = 0) -> Request:
    made = Request(0, list(tokens), SamplingParams(), seed=0)
    made.blocks, made.computed = list(blocks), computed
    return made


def filled(pool: BlockPool, tokens: list[int]) -> Request:
    """A request whose tokens are all computed and published."""
    made = request(tokens, pool.allocate(pool.blocks_for(len(tokens))), len(tokens))
    pool.publish(made)
    return made


@pytest.mark.parametrize("sizes", [{"block_size": 1 << 40}, {"max_model_len": 1 << 40}, {"num_blocks": 1 << 40}])
def test_a_cache_beyond_memory_is_refused(sizes):
    model = model_config(normalise({**QWEN3, "max_position_embeddings": 1 << 40}), "m")
    with pytest.raises(UserError, match=f"{1 << 40}.* 1.0 GB are free"):
        size_cache(model, EngineConfig(model="m", **sizes), torch.float32, 10**9)


def test_a_prefix_is_found_while_held_and_after():
    pool = BlockPool(8, SIZE)
    first = filled(pool, list(range(11)))
    assert pool.hold_prefix(request(list(range(11)))) == first.blocks[:2]
    assert pool.num_free == 5
    pool.release(first.blocks)
    pool.release(first.blocks[:2])
    assert pool.num_free == 8
    assert pool.hold_prefix(request(list(range(9)))) == first.blocks[:2]
    assert pool.num_free == 6


def test_one_token_is_always_left_to_compute():
    pool = BlockPool(8, SIZE)
    first = filled(pool, list(range(8)))
    assert pool.hold_prefix(request(list(range(8)))) == first.blocks[:1]
    assert pool.hold_prefix(request(list(range(4)))) == []


@pytest.mark.parametrize("other", [[9, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 9, 4, 5, 6, 7, 8]])
def test_a_block_counts_all_tokens_before_it(other):
    pool = BlockPool(8, SIZE)
    filled(pool, list(range(9)))
    assert pool.hold_prefix(request(other)) == []


def test_only_computed_and_known_tokens_are_shared():
    pool = BlockPool(8, SIZE)
    some = request(list(range(12)), pool.allocate(3), computed=7)
    pool.publish(some)
    assert pool.hold_prefix(request(list(range(12)))) == some.blocks[:1]
    late = request(list(range(20, 27)), pool.allocate(2), computed=8)  # the eighth token's id is not known yet
    pool.publish(late)
    assert pool.hold_prefix(request(list(range(20, 32)))) == late.blocks[:1]


def test_a_block_handed_out_again_is_forgotten():
    pool = BlockPool(3, SIZE)
    first = filled(pool, list(range(12)))
    pool.release(first.blocks)
    taken = pool.allocate(1)
    assert taken == first.blocks[2:], "the end of a sequence goes first"
    assert pool.hold_prefix(request(list(range(13)))) == first.blocks[:2]


def test_too_many_blocks_and_double_release_are_caught():
    pool = BlockPool(2, SIZE)
    with pytest.raises(AssertionError, match="3 blocks asked for, 2 free"):
        pool.allocate(3)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


@pytest.mark.parametrize("seed", range(5))
def test_random_life_of_a_pool(seed):
    """Sequences over two letters come and go; held blocks are never handed out, and a hit holds the right tokens."""
    rng = np.random.default_rng(seed)
    pool = BlockPool(12, SIZE)
    content: dict[int, tuple[int, ...]] = {}  # block -> the tokens up to its end, once it is full
    live: list[Request] = []
    hits = 0
    for _ in range(2000):
        if live and (rng.random() < 0.5 or pool.num_free < 4):
            pool.release(live.pop(rng.integers(len(live))).blocks)
        else:
            tokens = rng.integers(0, 2, rng.integers(1, 16)).tolist()
            made = request(tokens)
            prefix = pool.hold_prefix(made)
            for n, block in enumerate(prefix):
                assert content[block] == tuple(tokens[: (n + 1) * SIZE])
            hits += len(prefix)
            fresh = pool.allocate(pool.blocks_for(len(tokens)) - len(prefix))
            held = {block for other in live for block in other.blocks} | set(prefix)
            assert not held & set(fresh), "a held block was handed out"
            made.blocks, made.computed = prefix + fresh, len(tokens)
            for n, block in enumerate(made.blocks[: len(tokens) // SIZE]):
                content[block] = tuple(tokens[: (n + 1) * SIZE])
            pool.publish(made)
            live.append(made)
        held = {block for other in live for block in other.blocks}
        assert pool.num_free == 12 - len(held)
    assert hits > 100
