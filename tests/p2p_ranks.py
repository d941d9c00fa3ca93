"""Rank processes with a GPU each, or sharing one, that run rounds of the p2p exchange; each checks its own tokens."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from p2p_cases import Case, inputs, reference, run_experts, shape_of

from epmoe.comm import Comm, open_comm
from epmoe.moe.p2p import P2P, PeerFailed


def run_ranks(world: int, function: Callable, *args, gpus: int = 1, own: bool = False, timeout_s: float = 120) -> list:
    """``function(comm, *args)`` on every rank; per rank what it returned, or the exit code of a rank that died.

    ``own``: a rank sees only its own of the GPUs.  An exception on a rank is raised here; ranks that are left then are
    killed.
    """
    context = multiprocessing.get_context("forkserver")  # each rank forks from a process that has imported torch
    context.set_forkserver_preload(["torch", "triton"])
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            init = f"file://{Path(folder) / 'rendezvous'}"
            args_of_rank = (theirs, rank, world, gpus, own, init, timeout_s, function, args)
            processes.append(context.Process(target=_serve, args=args_of_rank, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        results, deadline = [], time.monotonic() + timeout_s
        try:
            for pipe, process in zip(pipes, processes):
                assert pipe.poll(max(0.1, deadline - time.monotonic())), f"no answer in {timeout_s} s; so far {results}"
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    process.join()
                    ok, value = True, process.exitcode
                assert ok, value
                results.append(value)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return results


def _serve(pipe, rank: int, world: int, gpus: int, own: bool, rendezvous: str, timeout_s: float, function, args):
    faulthandler.dump_traceback_later(0.8 * timeout_s)  # where a rank that hangs stands
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    try:
        if own:
            shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
            os.environ["CUDA_VISIBLE_DEVICES"], gpus = shown.split(",")[rank], 1
        device = torch.device("cuda", rank % gpus)
        torch.cuda.set_device(device)
        comm = open_comm(rank, world, device, rendezvous, 60.0)
        pipe.send((True, function(comm, *args)))
    except BaseException:
        pipe.send((False, f"rank {rank}: {traceback.format_exc()}"))
    os._exit(0)


class Layer:
    """One MoE layer's exchange on one rank, with poisoned buffers and random delays."""

    def __init__(self, exchange: P2P, case: Case, delays: bool) -> None:
        self.exchange, self.case, self.delays = exchange, case, delays

    def delay(self) -> None:
        if self.delays:
            torch.cuda._sleep(random.randrange(200_000))
            if random.random() < 0.2:
                time.sleep(random.random() * 2e-3)

    def poison(self, lane: int, first: str, last: str) -> None:
        layout = self.exchange.layout
        end = layout.at(last) + layout.sizes[last]
        self.exchange.lanes[lane].buffer[layout.at(first) : end].fill_(0xFF)

    def __call__(self, x, slot, weight, add=None, lane: int = 0) -> torch.Tensor:
        exchange = self.exchange
        self.poison(lane, "returned", "returned")  # nobody writes there before this dispatch has arrived
        self.delay()
        sending = exchange.dispatch_send(exchange.dispatch_begin(x, slot, weight, lane))
        self.delay()
        received, route = exchange.dispatch_end(sending, self.case.slots)
        out = run_experts(received, self.case.slots, exchange.comm.rank)
        self.poison(lane, "slot", "token")  # nor there before this combine has
        self.poison(lane, "rows", "rows")
        self.delay()
        returning = exchange.combine_begin(out, route)
        self.delay()
        return exchange.combine_end(returning, add)


def data_of(case: Case, comm: Comm, seed: int, full: bool = False):
    """This rank's tokens; in some rounds all go to one rank, or (unless ``full``) the rank has none."""
    only = seed % case.world if seed % 5 == 0 else None
    x, slot, weight = inputs(case, seed * case.world + comm.rank, only=only)
    tokens = 0 if seed % 7 == comm.rank + 1 else 1 + (seed * 13 + comm.rank * 5) % case.tokens
    tokens = case.tokens if full else tokens
    # Pinned, so that copies do not hold the host up.
    return tuple(part[:tokens].pin_memory().to(comm.device, non_blocking=True) for part in (x, slot, weight))


def differs(y: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """On the device, so that the host runs rounds ahead: a process that shares a GPU gets its turn rarely."""
    assert y.shape == want.shape, f"answers {tuple(y.shape)}, not {tuple(want.shape)}"
    return (y != want).any()


def eager_rounds(comm: Comm, case: Case, rounds: int, copy_from: int) -> int:
    """Rounds whose answer is not the reference's; other sizes every time, lanes in turn, random delays."""
    exchange = P2P(comm, shape_of(case))
    exchange.copy_from = copy_from
    layer, bad = Layer(exchange, case, True), torch.zeros((), dtype=torch.int64, device=comm.device)
    for seed in range(rounds):
        exchange.begin_step(case.tokens if seed % 3 else case.bound)
        data = data_of(case, comm, seed)
        bad += differs(layer(*data, lane=seed % 2), reference(case, *data))
    bad = int(bad)
    exchange.raise_if_failed()
    return bad


def all_rounds(comm: Comm, case: Case, eager: int, graphed: int) -> tuple[int, int]:
    """Put and copy by size, then two lanes in a graph."""
    return eager_rounds(comm, case, eager, case.bound), graph_rounds(comm, case, graphed)


def over_nccl_and_p2p(comm: Comm, case: Case) -> tuple[bool, list[int], int]:
    """Whether rows go over NCCL, what came when rank w sent everybody w, and the bad ones of 20 rounds."""
    rows = torch.full((comm.world, 1), comm.rank, device=comm.device)
    came = comm.all_to_all(rows, [1] * comm.world, [1] * comm.world).wait()
    return comm.on_nccl, came.flatten().tolist(), eager_rounds(comm, case, 20, case.bound)


def graph_rounds(comm: Comm, case: Case, rounds: int) -> int:
    """The same with two lanes under way at once in one captured graph, and eager steps between its replays; replays
    are counted like them."""
    exchange = P2P(comm, shape_of(case))
    layer, bad = Layer(exchange, case, False), torch.zeros((), dtype=torch.int64, device=comm.device)
    exchange.begin_step(case.tokens)
    full = [data_of(case, comm, lane, True) for lane in range(2)]
    warm = [layer(*full[lane], lane=lane) for lane in range(2)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        under_way = [exchange.dispatch_begin(*full[lane], lane) for lane in range(2)]
        arrived = [exchange.dispatch_end(sending, case.slots) for sending in under_way]
        back = [exchange.combine_begin(run_experts(r, case.slots, comm.rank), route) for r, route in arrived]
        y = [exchange.combine_end(returning) for returning in back]
    layer.delays, sent = True, 2 * case.tokens
    for seed in range(rounds):
        exchange.begin_step(case.tokens)
        for lane in range(2):
            for part, value in zip(full[lane], data_of(case, comm, seed * 2 + lane, True)):
                part.copy_(value)
        layer.delay()
        graph.replay()
        sent += 2 * case.tokens
        for lane in range(2):
            bad += differs(y[lane], reference(case, *full[lane]))
        if seed % 3 == 0:
            data = data_of(case, comm, seed)
            sent += len(data[0])
            bad += differs(layer(*data, lane=seed % 2), reference(case, *data))
    bad = int(bad)
    exchange.raise_if_failed()
    assert exchange.traffic().tokens == sent, (exchange.traffic().tokens, sent)
    del warm
    return bad


def die_in_a_round(comm: Comm, case: Case, graphed: bool) -> str:
    """Rank 1 is killed in step 3; what the others say, how long after they came to that step's end, and how long a
    whole layer takes from then on: its waits must end at once."""
    exchange = P2P(comm, shape_of(case))
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            exchange.watch_peers()

    threading.Thread(target=watch, daemon=True).start()
    comm.at.layer = 5
    layer, data = Layer(exchange, case, False), data_of(case, comm, 1)
    layer(*data)
    if graphed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer(*data)
    for step in range(1, 6):
        comm.all_gather_headers(np.zeros(1, np.int64))
        comm.at.step = step
        exchange.begin_step(case.bound)
        if step == 3 and comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        seconds = timed(lambda: graph.replay() if graphed else layer(*data))
        try:
            exchange.raise_if_failed()
        except PeerFailed as error:
            again = timed(lambda: graph.replay() if graphed else layer(*data))
            return f"{error} ({seconds:.1f} s, then {again:.1f} s)"
    return "nothing noticed"


def timed(call: Callable) -> float:
    """Seconds until the device has ended what ``call`` gives it."""
    begin = time.monotonic()
    call()
    torch.cuda.synchronize()
    return time.monotonic() - begin


def lose_a_rank_in_a_step(comm: Comm, config: dict, script, seen: bool) -> str:
    """Rank 1 is killed between the agreement on step 12 and its forward pass; what the others report, and how long it
    took until then and until nothing ran on their device.  ``seen``: whether ends of processes show."""
    from drive import Engine, EngineConfig

    from epmoe.engine.watchdog import watch
    from epmoe.engine.worker import cause_of

    engine = Engine(EngineConfig.from_dict(config), comm)
    if not seen:
        engine.runner.decoder.exchange.memory.processes[:] = [None] * comm.world
    watch(comm.at, 60, lambda error: None, engine.runner.decoder.exchange.watch_peers)
    launch = engine.runner.launch

    def launch_or_die(*args):
        if comm.rank == 1 and engine.steps == 12:
            torch.cuda.synchronize()  # step 11 is over for all
            os.kill(os.getpid(), signal.SIGKILL)
        return launch(*args)

    engine.runner.launch = launch_or_die
    new = [{"op": "add", "id": n, "prompt": prompt, "params": params} for n, prompt, params in script.requests]
    begin = time.monotonic()
    try:
        while engine.steps < 30:
            begin = time.monotonic() if engine.steps <= 12 else begin
            engine.step(new if comm.rank == 0 and engine.steps == 0 else [])
    except RuntimeError as error:
        cause = cause_of(error, engine)
        torch.cuda.synchronize()
        return f"{cause} ({time.monotonic() - begin:.1f} s)"
    return "nothing noticed"


def drive_engine(comm: Comm, config: dict, script):
    """The engine on this rank; logits come back as arrays, which outlive this process."""
    from drive import drive

    result = drive(comm, config, script)
    result.logits = {key: logits.float().cpu().numpy() for key, logits in result.logits.items()}
    return result
