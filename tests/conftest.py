"""Fixtures that more than one test file uses."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Real traces and a small checkpoint beside the project; the tests that need them are left out without it."""
    if not SHARED.is_dir():
        pytest.skip(f"left out: {SHARED} (real traces and a small checkpoint) is not there")
    return SHARED
