"""Fixtures that more than one test file uses."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helper modules beside the tests, also in spawned ranks

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Real traces and a small checkpoint beside the project; the tests that need them are left out without it."""
    if not SHARED.is_dir():
        pytest.skip(f"left out: {SHARED} (real traces and a small checkpoint) is not there")
    return SHARED


@pytest.fixture(scope="session")
def rank_pool():
    """``rank_pool(W)``: a pool of W gloo ranks, the same one all session long."""
    from ranks import RankPool

    pools = {}

    def pool(world: int, threads: int = 1) -> RankPool:
        key = (world, threads)
        if key in pools and pools[key].broken:
            pools.pop(key).close()
        if key not in pools:
            pools[key] = RankPool(world, threads)
        return pools[key]

    yield pool
    for opened in pools.values():
        opened.close()


@pytest.fixture(scope="module")
def gpu_pair():
    """Two ranks on GPUs, on the same one where there is only one."""
    from ranks import RankPool

    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    opened = RankPool(2, device="cuda")
    yield opened
    opened.close()
