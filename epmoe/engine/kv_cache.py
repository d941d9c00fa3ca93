"""Blocks of the paged KV cache: reference counts, sharing of equal prefixes, least recently used first.

A block is *free* when no request holds it.  A full block whose tokens are known carries the hash of all tokens up to
its end; a free block keeps its hash until it is handed out again, so a later request with the same prefix finds it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np
import torch

from epmoe.config import EngineConfig
from epmoe.engine.request import Request
from epmoe.model_config import ModelConfig
from placement.errors import UserError

CACHE_SHARE = {"cuda": 0.5, "cpu": 1 / 16}  # of free memory; a host's is shared by all its ranks


class BlockPool:
    """Which blocks are held, shared, and free on one rank."""

    def __init__(self, num_blocks: int, block_size: int, reuse_prefixes: bool = True) -> None:
        self.block_size = block_size
        self.reuse_prefixes = reuse_prefixes
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks, the longest unused first. The caller has looked at ``num_free``."""
        assert count <= self.num_free, f"{count} blocks asked for, {self.num_free} free"
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            if (digest := self._hash[block]) is not None:
                del self._by_hash[digest]
                self._hash[block] = None
            self._holders[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: list[int]) -> None:
        """Drop one hold on each block; the end of a sequence is reused before its (more often shared) start."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            assert self._holders[block] >= 0, f"block {block} released twice"
            if self._holders[block] == 0:
                self._free[block] = None

    def hold_prefix(self, request: Request) -> list[int]:
        """Take a hold on the cached blocks of the longest known prefix; at least one token is left to compute."""
        if not self.reuse_prefixes:
            return []
        self._hash_blocks(request, (request.known - 1) // self.block_size)
        held = []
        for digest in request.block_hashes[: (request.known - 1) // self.block_size]:
            block = self._by_hash.get(digest)
            if block is None:
                break
            if self._holders[block] == 0:
                del self._free[block]
            self._holders[block] += 1
            held.append(block)
        return held

    def publish(self, request: Request) -> None:
        """Let others share the request's full blocks (tokens known, keys and values written)."""
        if not self.reuse_prefixes or (request.published + 1) * self.block_size > request.computed:
            return
        full = min(request.computed, request.known) // self.block_size
        if full <= request.published:
            return
        self._hash_blocks(request, full)
        new = slice(request.published, full)
        request.published = full
        for block, digest in zip(request.blocks[new], request.block_hashes[new]):
            if self._hash[block] is None and digest not in self._by_hash:
                self._hash[block] = digest
                self._by_hash[digest] = block

    def _hash_blocks(self, request: Request, count: int) -> None:
        """Extend ``request.block_hashes`` to ``count`` blocks; each hash covers all tokens before it too."""
        hashes, size = request.block_hashes, self.block_size
        while len(hashes) < count:
            start = len(hashes) * size
            tokens = np.array(request.tokens(start, start + size), np.int64).tobytes()
            hashes.append(hashlib.blake2b((hashes[-1] if hashes else b"") + tokens, digest_size=16).digest())


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return config.num_layers * 2 * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize


def size_cache(config: ModelConfig, engine: EngineConfig, dtype: torch.dtype, free_bytes: int) -> int:
    """Blocks for one rank: as many as ``max_requests`` of full length need, within this rank's share of the memory that
    is free on its device; at least one request of full length must fit."""
    if engine.num_blocks is not None:
        need = engine.num_blocks * block_bytes(config, engine.block_size, dtype)
        if need > free_bytes:
            raise UserError(
                f"num_blocks {engine.num_blocks} of {engine.block_size} tokens need {need / 1e9:.1f} GB,"
                f" {free_bytes / 1e9:.1f} GB are free for them; lower num_blocks or block_size"
            )
        return engine.num_blocks
    per_request = -(-engine.max_model_len // engine.block_size)
    need = per_request * block_bytes(config, engine.block_size, dtype)
    if need > free_bytes:
        raise UserError(
            f"max_model_len {engine.max_model_len} in blocks of {engine.block_size} tokens needs {need / 1e9:.1f} GB,"
            f" {free_bytes / 1e9:.1f} GB are free for a rank's cache; lower max_model_len or block_size"
        )
    fitting = int(free_bytes * CACHE_SHARE[engine.device]) // block_bytes(config, engine.block_size, dtype)
    return max(per_request, min(per_request * engine.max_requests, fitting))


def new_cache(config: ModelConfig, engine: EngineConfig, num_blocks: int, device: torch.device) -> torch.Tensor:
    """``[layers, 2, KVH, blocks, block_size, d]``, not initialised: attention never reads what was not written."""
    shape = (config.num_layers, 2, config.num_kv_heads, num_blocks, engine.block_size, config.head_dim)
    return torch.empty(shape, dtype=getattr(torch, engine.dtype), device=device)
