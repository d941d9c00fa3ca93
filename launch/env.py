"""The process's surroundings: torchrun's variables, cores, devices, the environment of a child.

The only file that reads ``os.environ``.
"""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from placement.errors import UserError

SHARED_GPU_MEMORY = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Torchrun:
    """What torchrun tells the processes it starts."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    master_addr: str
    master_port: int
    restart: int
    agent_store: bool  # torchrun itself keeps the store at the master address
    error_file: str  # where torchrun looks for the error of this rank; empty outside its agent
    log_dir: str  # this rank's own folder, which torchrun makes; empty outside its agent


def read_torchrun() -> Torchrun | None:
    """The torchrun variables of this process, or ``None`` where it is no rank."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return None
    if missing := [name for name in TORCHRUN if name not in os.environ]:
        raise UserError(f"RANK or WORLD_SIZE is set but not {', '.join(missing)}; start ranks with torchrun")
    try:
        rank, world, local_rank, local_world = (int(os.environ[name]) for name in TORCHRUN[:4])
        port = int(os.environ["MASTER_PORT"])
    except ValueError as error:
        raise UserError(f"a variable of torchrun is no whole number ({error}); start ranks with torchrun") from None
    if not (0 <= local_rank < local_world <= world and local_rank <= rank < world and 0 < port < 1 << 16):
        stated = ", ".join(f"{name} {os.environ[name]}" for name in TORCHRUN if name != "MASTER_ADDR")
        raise UserError(f"torchrun's variables contradict each other: {stated}; start ranks with torchrun")
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    return Torchrun(
        *(rank, world, local_rank, local_world),
        master_addr=os.environ["MASTER_ADDR"],
        master_port=port,
        restart=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        agent_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        error_file=error_file,
        log_dir=str(Path(error_file).parent) if error_file else "",
    )


def allow_shared_gpus() -> None:
    """In a process that is a rank itself: torch may map memory between ranks whose GPUs have one number, because they
    share one or because each sees only its own."""
    os.environ.setdefault(SHARED_GPU_MEMORY, "1")


def child_environment(threads: int) -> dict[str, str]:
    """This environment for a process of the run: ``threads`` intra-op threads, and without torchrun's rank."""
    kept = {k: v for k, v in os.environ.items() if k not in TORCHRUN and not k.startswith("TORCHELASTIC_")}
    if not has_gpu():
        kept.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks of one machine listen on the loopback only
    kept.setdefault(SHARED_GPU_MEMORY, "1")
    root = str(Path(__file__).resolve().parents[1])
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):  # a source tree, found by sys.path
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, (root, kept.get("PYTHONPATH"))))
    return kept | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def tuned_file() -> Path:
    """Where ``epmoe tune`` keeps its results and runs look for them: the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "epmoe" / "epmoe-tuned.json"


def cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def has_gpu() -> bool:
    """Whether the driver of an NVIDIA GPU is loaded and a GPU visible; reads its files, imports nothing."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    return not hidden and any(Path("/dev").glob("nvidia[0-9]*"))
