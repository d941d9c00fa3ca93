"""Runs a recording engine on the ranks of a pool, and what transformers' routers choose on the same tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from epmoe.comm import Comm
from epmoe.config import EngineConfig
from epmoe.engine.engine import Engine

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "record_transformers_trace.py"


def record(comm: Comm, config: dict, requests: list[tuple[int, list[int], dict]]) -> dict:
    """Run requests ``(id, prompt, params)`` to their end; this rank's sequences, outputs and counters."""
    engine = Engine(EngineConfig.from_dict(config), comm)
    moved = []
    withdraw = engine.scheduler.withdraw
    engine.scheduler.withdraw = lambda number: (moved.append(number), withdraw(number))
    messages = [{"op": "add", "id": n, "prompt": prompt, "params": params} for n, prompt, params in requests]
    messages = [*messages, {"op": "stop"}] if comm.rank == 0 else []
    outputs: dict[int, list[int]] = {}
    while not engine.finished:
        for output in engine.step(messages):
            outputs.setdefault(output.request_id, []).extend(output.tokens)
        messages = []
    sequences = {n: (tokens, ids) for n, tokens, ids in engine.recorder.sequences()}
    return {
        "sequences": sequences,
        "outputs": outputs,
        "full": engine.recorder.full,
        "moved": moved,
        "preemptions": engine.report()["preemptions"],
        "report": engine.report(),
    }


class Reference:
    """transformers on a checkpoint, in float32."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        spec = importlib.util.spec_from_file_location("record_transformers_trace", SCRIPT)
        script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
        self._torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._recorder = script.Recorder(self.model)

    def logits(self, tokens) -> object:
        """``[T, V]``."""
        with self._torch.inference_mode():
            logits = self.model(self._torch.tensor(np.asarray(tokens, np.int64))[None], use_cache=False).logits[0]
        self.ids_TLK = self._recorder.take()
        return logits

    def choices(self, tokens) -> np.ndarray:
        """Chosen experts ``[T, L, K]``, each row in ascending order."""
        self.logits(tokens)
        return np.sort(self.ids_TLK, -1)
