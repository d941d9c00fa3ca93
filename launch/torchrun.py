"""Under torchrun this process is a rank; rank 0 also starts the front, which is always a process of its own.

The front binds its sockets and tells rank 0, over a pipe, where they are and what the engine's configuration is; rank 0
hands that to the other ranks through the job's store.  ``python -m launch.torchrun FD WORLD LOCAL_WORLD INTERFACE
COMMAND ...`` is that front; INTERFACE is the address to listen on, ``-`` within one machine.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from launch.env import Torchrun, allow_shared_gpus, child_environment, cores
from launch.failure import RankFailure, read_error_files
from launch.rank import be_rank
from launch.signals import SIGNALS
from placement.errors import UserError

if TYPE_CHECKING:
    from epmoe.config import EngineConfig
    from launch.front import Addresses

DRAIN_S = 8.0  # from SIGTERM to the end of a rank; torchrun itself waits longer
AGENT_POLL_S = 0.5
JOIN_S = 3600.0  # for the front's word: it may solve a placement first


def run_rank(torchrun: Torchrun, argv: list[str]) -> int:
    """Be rank ``torchrun.rank`` of the command ``argv``; the exit code."""
    if torchrun.error_file:  # an agent is there
        threading.Thread(target=_end_with_agent, args=(os.getppid(),), daemon=True).start()
    front, word = _start_front(torchrun, argv) if torchrun.rank == 0 else (None, None)
    started = threading.Event()
    _drain_on_signals(front, started)
    line = None if front is None else _front_word(front, word)
    try:
        word = json.loads(_share(torchrun, line))
    except BaseException:
        if front is not None:  # it would report that this rank is gone, over the reason why
            front.kill()
            shutil.rmtree(json.loads(line)["run_dir"], ignore_errors=True)
        raise
    started.set()
    run_dir = word["run_dir"] if torchrun.rank == torchrun.local_rank else torchrun.log_dir

    about = {
        "rank": torchrun.rank,
        "world": torchrun.world,
        "local_rank": torchrun.local_rank,
        "init_method": f"tcp://{torchrun.master_addr}:{torchrun.master_port}",
        "requests_addr": word["requests"],
        "outputs_addr": word["outputs"],
        "run_dir": run_dir,
        "error_file": torchrun.error_file,
    }
    if front is not None:
        threading.Thread(target=_end_with_front, args=(front, run_dir), daemon=True).start()
    allow_shared_gpus()
    be_rank(about, word["engine"])
    return 0 if front is None else front.wait()


def _start_front(torchrun: Torchrun, argv: list[str]) -> tuple[subprocess.Popen, int]:
    """The front's process, and the pipe its word comes through."""
    read, write = os.pipe()
    one_machine = torchrun.world == torchrun.local_world
    interface = "-" if one_machine else socket.gethostbyname(torchrun.master_addr)
    about = [str(write), str(torchrun.world), str(torchrun.local_world), interface]
    process = subprocess.Popen(
        [sys.executable, "-m", "launch.torchrun", *about, *argv],
        stdin=subprocess.PIPE,
        env=child_environment(cores()),
        pass_fds=[write],
        start_new_session=True,
    )
    os.close(write)
    return process, read


def _front_word(front: subprocess.Popen, word: int) -> str:
    """The one line the front sends; without one it has failed and said why, so this rank ends with its code."""
    with os.fdopen(word, encoding="utf-8") as pipe:
        line = pipe.readline()
    if not line:
        code = front.wait()
        sys.exit(code if code > 0 else 1)
    return line


def _share(torchrun: Torchrun, line: str | None) -> str:
    """Rank 0's line, on every rank, through the store that torchrun keeps for the job."""
    from torch.distributed import DistNetworkError, TCPStore

    try:
        store = TCPStore(
            torchrun.master_addr,
            torchrun.master_port,
            is_master=not torchrun.agent_store and torchrun.rank == 0,
            timeout=timedelta(seconds=JOIN_S),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except DistNetworkError as error:
        where = f"{torchrun.master_addr}:{torchrun.master_port}"
        raise UserError(f"cannot meet the other ranks at {where}: {error}; give another --master-port") from None
    key = f"epmoe/front/{torchrun.restart}"
    if line is not None:
        store.set(key, line)
    return store.get(key).decode()


def _end_with_front(front: subprocess.Popen, run_dir: str) -> None:
    """A front that fails ends rank 0, and torchrun then ends the others; one that was killed left its folder."""
    if code := front.wait():
        shutil.rmtree(run_dir, ignore_errors=True)
        os._exit(code if code > 0 else 1)


def _end_with_agent(agent: int) -> None:
    """A torchrun that was killed ends its ranks, and the end of rank 0 the front."""
    while os.getppid() == agent:
        time.sleep(AGENT_POLL_S)
    os._exit(1)


def _drain_on_signals(front: subprocess.Popen | None, started: threading.Event) -> None:
    """Ctrl-C and SIGTERM reach every rank: the front drains, and a rank that is still there after a while ends.

    Before the ranks have ``started`` there is nothing to drain, and they end at once.

    A thread acts on them, since the main thread may sit in a collective, where no Python handler runs.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    for each in SIGNALS:
        signal.signal(each, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def act() -> None:
        number = os.read(read, 1)[0]
        if front is not None and front.poll() is None:
            front.send_signal(number)
        time.sleep(DRAIN_S if started.is_set() else 0)
        os._exit(128 + number)

    threading.Thread(target=act, daemon=True).start()


# -- the front's side -------------------------------------------------------------------------------------------------


class Attached:
    """Ranks that torchrun started, as the front sees them: it is told where they write errors, and when rank 0 ends."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._rank0_ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while os.read(0, 1):
            pass
        self._rank0_ended.set()

    def check(self, ending: bool = False) -> None:
        reports = read_error_files(self._run_dir)
        if reports:
            raise reports[0]
        if self._rank0_ended.is_set() and not ending:
            raise RankFailure(0, "ended; torchrun's report names the first failure")

    def finish(self, seconds: float) -> None:
        """torchrun waits for its ranks."""

    def kill(self) -> None:
        """The end of this process ends rank 0, and torchrun the others."""


def front_main() -> int:
    word, world, local_world = (int(text) for text in sys.argv[1:4])
    interface = None if sys.argv[4] == "-" else sys.argv[4]

    from launch.__main__ import main
    from launch.session import Starting

    def start(run_dir: Path, addresses: Addresses, engine: EngineConfig, say: Callable[[str], None]) -> Attached:
        about = {**asdict(addresses), "run_dir": str(run_dir), "engine": engine.to_json()}
        try:
            with os.fdopen(word, "w", encoding="utf-8") as pipe:
                pipe.write(json.dumps(about) + "\n")
        except BrokenPipeError:
            raise RankFailure(0, "ended while the front started; torchrun's report names the first failure") from None
        return Attached(run_dir)

    return main(sys.argv[5:], Starting(world, local_world, start, interface))


if __name__ == "__main__":
    sys.exit(front_main())
