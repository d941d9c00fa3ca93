"""How many cores there are for this process; workers end with their parent; BLAS starts no threads of its own.

The solvers multiply many small matrices and bring their own parallelism. OpenBLAS would start a thread per core for
each product, which then wait for each other by spinning: on a busy machine a bound took ten times the processor time.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from pathlib import Path

_PDEATHSIG = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
_MAPS = Path("/proc/self/maps")
_NAMES = tuple(f"{lead}openblas_set_num_threads{tail}" for lead in ("scipy_", "") for tail in ("64_", "_64", ""))


def usable_cores() -> int:
    """Cores this process may run on: fewer than the machine's under ``taskset`` or in a container."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def end_with_parent() -> None:
    """For the start of a worker process: it ends when the process that made it does, also by a signal (on Linux).

    Idle workers wait for work on a pipe that they hold the other end of too: without this they would wait for ever.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def one_blas_thread() -> int:
    """Set every loaded OpenBLAS to one thread; how many were found (0 where there is no ``/proc`` or another BLAS)."""
    if not _MAPS.exists():
        return 0
    loaded = set(re.findall(r"(/\S*openblas\S*\.so\S*)", _MAPS.read_text(errors="replace")))
    found = 0
    for path in loaded:
        library = ctypes.CDLL(path)
        setter = next((getattr(library, name) for name in _NAMES if hasattr(library, name)), None)
        if setter is not None:
            setter(ctypes.c_int(1))
            found += 1
    return found
