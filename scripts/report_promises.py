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
from epmoe.model_config import ModelConfig
from placement.errors import UserError
from placement.plan import Plan, make_plan

MODEL = str(Path(epmoe.__file__).parent / "demo_model")
TEXTS = 7
WORD = {True: "holds", False: "BROKEN", None: "not run"}


def promises(comm: Comm, save: Callable, seconds: float, kinds: list[str]) -> list[dict]:
    """Deterministic tokens of one rank, and of all ranks: every exchange, lanes off and on, a random plan with copies.

    Placement changes no token (promise 1); batching changes none (2: requests in one batch, cut into short chunks, and
    one by one); ranks without a token take part (4: one request on all ranks, whose others have none).
    """
    ends = time.monotonic() + seconds
    requests = texts()
    want = serve(open_engine(Comm(0, 1, comm.device), settings()), requests).tokens
    agreed = gathered(comm, want)
    found = [{"case": "every rank alone draws the same", "promise": "1", "holds": all(each == want for each in agreed)}]
    _say(comm, found[-1])
    found.append(batching(comm, requests, want))
    _say(comm, found[-1])
    plans = {"linear": None, "random with copies": random_plan(comm.world).to_json()}
    order = [("random with copies", "on"), ("linear", "off"), ("random with copies", "off"), ("linear", "on")]
    lasted = 0.0  # the case before
    for (name, overlap), kind in product(order, kinds):
        case = {"case": f"{kind}, lanes {overlap}, {name}", "promise": "1, 2, 4", "holds": None}
        if max(gathered(comm, time.monotonic() + lasted > ends)):
            found.append(case | {"why": "no time was left"})
            continue
        chosen = {"plan": plans[name], "exchange": kind, "overlap": overlap}
        found.append(case | checked(comm, chosen, requests, want))
        lasted = found[-1].get("seconds", 0.0)
        save(found)
        _say(comm, found[-1])
    return found


def batching(comm: Comm, requests: list[dict], want: dict) -> dict:
    """On one rank: every request by itself, and all of them in steps of 16 tokens."""
    alone = Comm(0, 1, comm.device)
    engine, began = open_engine(alone, settings()), time.monotonic()
    wrong = [each["id"] for each in requests if serve(engine, [each]).tokens[each["id"]] != want[each["id"]]]
    chunked = serve(open_engine(alone, settings() | {"max_batch_tokens": 16}), requests).tokens
    wrong += [f"{number} in chunks" for number in want if chunked[number] != want[number]]
    found = gathered(comm, wrong)
    result = {"case": "one by one, and in chunks of 16", "promise": "2", "holds": not any(found)}
    result["seconds"] = time.monotonic() - began
    return result | ({"why": f"other tokens in requests {found}"} if any(found) else {})


def checked(comm: Comm, chosen: dict, requests: list[dict], want: dict) -> dict:
    began = time.monotonic()
    try:
        engine = open_engine(comm, settings() | chosen)
        together = serve(engine, requests)
        one = serve(engine, requests[2:3])
        engine.close()
    except UserError as error:
        return {"holds": None, "why": str(error)}
    except (RuntimeError, AssertionError):
        return {"holds": False, "why": traceback.format_exc(limit=-4)}
    wrong = sorted(i for i in want if together.tokens.get(i) != want[i])
    wrong_alone = sorted(i for i in one.tokens if one.tokens[i] != want.get(i))
    result = {"holds": not wrong and not wrong_alone and len(one.tokens) == 1, "seconds": time.monotonic() - began}
    del engine
    gc.collect()
    if wrong or wrong_alone:
        result["why"] = f"other tokens in requests {wrong}; alone in {wrong_alone}"
    return result


def _say(comm: Comm, case: dict) -> None:
    if comm.rank == 0:
        print("  ", WORD[case["holds"]], case["case"], case.get("why", ""), flush=True)


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
