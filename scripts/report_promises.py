"""Promises that several GPUs could break, with the embedded model: the second part of multi_gpu_report.py."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
from report_engine import gathered, open_engine, serve

import epmoe
from epmoe.comm import Comm
from epmoe.config import ModelConfig
from placement.errors import UserError
from placement.plan import Plan, make_plan

MODEL = str(Path(epmoe.__file__).parent / "demo_model")
TEXTS = 7
WORD = {True: "holds", False: "BROKEN", None: "not run"}


def promises(comm: Comm, save: Callable, seconds: float, kinds: list[str]) -> list[dict]:
    """Deterministic tokens of one rank, and of all ranks: every exchange, lanes off and on, a random plan with copies.

    Placement changes no token (promise 1), batching changes none (2: requests alone, and together), ranks without a
    token take part (4: one request on all ranks).
    """
    ends = time.monotonic() + seconds
    requests = texts()
    alone = Comm(0, 1, comm.device)
    want = serve(open_engine(alone, settings()), requests).tokens
    agreed = gathered(comm, want)
    found = [{"case": "every rank alone gives the same", "holds": all(each == want for each in agreed)}]
    plans = {"linear": None, "random with copies": random_plan(comm.world).to_json()}
    order = [("random with copies", "on"), ("linear", "off"), ("random with copies", "off"), ("linear", "on")]
    for (name, overlap), kind in product(order, kinds):
        if max(gathered(comm, time.monotonic() > ends)):
            found.append({"case": "left out for lack of time", "holds": None})
            break
        chosen = {"plan": plans[name], "exchange": kind, "overlap": overlap}
        found.append({"case": f"{kind}, lanes {overlap}, {name}", **checked(comm, chosen, requests, want)})
        save(found)
        if comm.rank == 0:
            print("  ", WORD[found[-1]["holds"]], found[-1]["case"], found[-1].get("why", ""), flush=True)
    return found


def checked(comm: Comm, chosen: dict, requests: list[dict], want: dict) -> dict:
    began = time.monotonic()
    try:
        engine = open_engine(comm, settings() | chosen)
        together = serve(engine, requests)
        one = serve(engine, requests[2:3])
    except UserError as error:
        return {"holds": None, "why": str(error)}
    except (RuntimeError, AssertionError):
        return {"holds": False, "why": traceback.format_exc(limit=-4)}
    wrong = sorted(i for i in want if together.tokens.get(i) != want[i])
    wrong_alone = sorted(i for i in one.tokens if one.tokens[i] != want[i])
    del engine
    gc.collect()
    result = {"holds": not wrong and not wrong_alone and len(one.tokens) == 1, "seconds": time.monotonic() - began}
    if wrong or wrong_alone:
        result["why"] = f"other tokens in requests {wrong}; alone in {wrong_alone}"
    return result


def settings() -> dict:
    sizes = {"max_batch_tokens": 128, "max_model_len": 192, "max_requests": 16, "num_blocks": 256}
    return {"model": MODEL, "dtype": "float32", "deterministic": True, **sizes}


def texts() -> list[dict]:
    """Prompts of one token to more than a step holds; greedy, and one sampled."""
    rng = np.random.default_rng(3)
    vocabulary = ModelConfig.from_folder(MODEL).vocab_size
    lengths = [1, 3, 150, 17, 64, 33, 90][:TEXTS]
    params = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True}
    drawn = {"temperature": 0.8, "seed": 5, "max_tokens": 10, "ignore_eos": True}
    return [
        {"id": n, "prompt": rng.integers(1, vocabulary, length).tolist(), "params": drawn if n == 3 else params}
        for n, length in enumerate(lengths)
    ]


def random_plan(world: int) -> Plan:
    """Experts dealt at random; a quarter of them on a second rank too."""
    shape = ModelConfig.from_folder(MODEL).moe_shape
    rng = np.random.default_rng(world)
    slots = []
    for _ in range(shape.num_layers):
        held = [list(map(int, part)) for part in np.array_split(rng.permutation(shape.num_experts), world)]
        for expert in rng.permutation(shape.num_experts)[: shape.num_experts // 4 if world > 1 else 0]:
            free = [part for part in held if int(expert) not in part]
            free[rng.integers(len(free))].append(int(expert))
        slots.append(held)
    return make_plan(shape, world, slots)
