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
    from torch.distributed import TCPStore

    from epmoe.config import EngineConfig
    from launch.front import Addresses

DRAIN_S = 8.0  # from SIGTERM to the end of a rank; torchrun itself waits longer
POLL_S = 0.5
MEET_S = 300.0  # for rank 0, or torchrun, to answer at the master address
SILENT_S = 10.0  # of it, before a rank says what it waits for
JOIN_S = 3600.0  # for the front's word: it may solve a placement first


def run_rank(torchrun: Torchrun, argv: list[str]) -> int:
    """Be rank ``torchrun.rank`` of the command ``argv``; the exit code."""
    if torchrun.error_file:  # an agent is there
        threading.Thread(target=_end_with_agent, args=(os.getppid(),), daemon=True).start()
    store = _meet(torchrun)
    front, word = _start_front(torchrun, argv) if torchrun.rank == 0 else (None, None)
    started = threading.Event()
    _drain_on_signals(front, started)
    word = json.loads(_share(torchrun, store, None if front is None else _front_word(front, word)))
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


def _meet(torchrun: Torchrun) -> TCPStore:
    """The job's store: torchrun's own, or else one that rank 0 opens here, before its front takes its time."""
    from torch.distributed import DistNetworkError, TCPStore

    opens = not torchrun.agent_store and torchrun.rank == 0
    if opens:
        _require_own(torchrun.master_addr)
    else:
        _wait_for(torchrun.master_addr, torchrun.master_port)
    try:
        store = TCPStore(
            torchrun.master_addr,
            torchrun.master_port,
            is_master=opens,
            timeout=timedelta(seconds=MEET_S),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except DistNetworkError as error:
        where = f"{torchrun.master_addr}:{torchrun.master_port}"
        raise UserError(f"cannot meet the other ranks at {where}: {error}; give another --master-port") from None
    store.set_timeout(timedelta(seconds=JOIN_S))
    return store


def _wait_for(address: str, port: int) -> None:
    """Until somebody answers there (torch would log every try); ``UserError`` when nobody does."""
    started, silent = time.monotonic(), True
    while True:
        try:
            socket.create_connection((address, port), timeout=SILENT_S).close()
            return
        except OSError as error:
            waited, reason = time.monotonic() - started, error.strerror or "no answer"
        if waited > MEET_S:
            raise UserError(
                f"nobody answers at {address}:{port} after {MEET_S:g} s ({reason}); rank 0 is to run there:"
                " check MASTER_ADDR and MASTER_PORT (torchrun --master-addr, --master-port)"
            )
        if silent and waited > SILENT_S:
            silent = False
            print(f"epmoe: waiting for rank 0 at {address}:{port} ({reason})", file=sys.stderr, flush=True)
        time.sleep(POLL_S)


def _require_own(address: str) -> None:
    """``UserError`` unless this machine can listen there, as the store and the front's sockets will."""
    try:
        socket.create_server((address, 0)).close()
    except OSError as error:
        raise UserError(
            f"cannot listen at the master address {address} ({error.strerror}); rank 0 is to run there: fix MASTER_ADDR"
        ) from None


def _share(torchrun: Torchrun, store: TCPStore, line: str | None) -> str:
    """Rank 0's line, on every rank."""
    from torch.distributed import DistNetworkError

    key = f"epmoe/front/{torchrun.restart}"
    if line is not None:
        store.set(key, line)
    try:
        return store.get(key).decode()
    except DistNetworkError:
        raise RankFailure(0, "ended before the run began; its own last line says why") from None


def _end_with_front(front: subprocess.Popen, run_dir: str) -> None:
    """A front that fails ends rank 0, and torchrun then ends the others; one that was killed left its folder."""
    if code := front.wait():
        shutil.rmtree(run_dir, ignore_errors=True)
        os._exit(code if code > 0 else 1)


def _end_with_agent(agent: int) -> None:
    """A torchrun that was killed ends its ranks, and the end of rank 0 the front."""
    while os.getppid() == agent:
        time.sleep(POLL_S)
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
