"""The frozen configurations of the engine and of one rank; the model's is read from its folder (`epmoe.model_config`).

``EngineConfig`` is made at the edge from the user's choices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from epmoe.model_config import DTYPES, ModelConfig
from placement.errors import UserError

MOST_REQUESTS = 1 << 16
MOST_THREADS = 1 << 10
EXCHANGES = ("auto", "alltoall", "oneshot", "padded", "p2p")


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs; made once by ``launch`` (or the Python API) and the same on every rank.

    Args:
        model: the checkpoint's folder.
        ranks: W.
        combine: "exact" (placement never changes a token) or "reduce" (fewer bytes, equal to rounding).
        exchange: how rows travel: "alltoall", "oneshot" (CPU), "padded", "p2p" (GPU), or "auto" (see
            ``moe.open_exchange``).
        wire: rows on their way to the experts: "model" dtype, or "fp8" (8 bits, a scale per 128 columns).
        capacity_factor: of the padded exchange, rows kept for each pair of ranks over the rows that even routing sends;
            a step that needs more runs again with exact sizes. 0 keeps a row for every token.
        exchange_costs: text of a calibration file of ``scripts/bench_exchange.py``, which "auto" goes by.
        max_batch_tokens: token budget of one rank and step.
        max_requests: requests that one rank runs at once.
        max_model_len: most tokens of one request, prompt and output.
        block_size: tokens of one KV block.
        num_blocks: KV blocks of one rank; None sizes the cache from ``max_requests`` and free memory.
        threads: intra-op threads of one rank; None divides the cores among the ranks of a node.
        async_steps: prepare step n + 1 while the device runs step n.
        graphs: run decode steps as CUDA graphs, on a GPU and with an exchange that can be captured.
        capture_at_start: capture the graphs of all sizes before the first request, so that none waits for one.
        record_tokens: most tokens whose routing a rank records; 0 is none. Recording turns prefix reuse off.
        overlap: "on" cuts every step in two lanes, so that each computes while the other's rows travel; "off" none;
            "auto" those that gain by it, as some steps of made-up tokens at start-up say.
        timeline: time every stage of every step (see ``moe.timeline``).
        probe_tokens: run this many tokens of a longer prompt first and move the request, before the rest, to the rank
            that serves most of the experts they chose (0: off).
        affinity: file of the plan's token affinities; homes are then chosen from prompt token ids.
        stall_seconds: a rank without progress for so long ends the run.
        plan: text of a plan file; None is the linear placement.
        tuned: text of a file of ``epmoe tune``; None leaves the kernels' tiles to the heuristic.
    """

    model: str
    ranks: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    combine: str = "exact"
    exchange: str = "alltoall"
    wire: str = "model"
    capacity_factor: float = 0.0
    deterministic: bool = False
    max_batch_tokens: int = 2048
    max_requests: int = 64
    max_model_len: int = 2048
    block_size: int = 16
    num_blocks: int | None = None
    threads: int | None = None
    seed: int = 0
    async_steps: bool = True
    graphs: bool = True
    capture_at_start: bool = False
    record_tokens: int = 0
    overlap: str = "off"
    timeline: bool = False
    probe_tokens: int = 0
    affinity: str | None = None
    stall_seconds: int = 300
    plan: str | None = field(default=None, repr=False)
    tuned: str | None = field(default=None, repr=False)
    exchange_costs: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for item in fields(self):
            _check_type(item.name, getattr(self, item.name), str(item.type))
        choices = {
            "device": ("cpu", "cuda"),
            "dtype": DTYPES,
            "combine": ("exact", "reduce"),
            "exchange": EXCHANGES,
            "wire": ("model", "fp8"),
            "overlap": ("off", "on", "auto"),
        }
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise UserError(f"{key} is {getattr(self, key)!r}; use one of {', '.join(allowed)}")
        needed = {"oneshot": "cpu", "p2p": "cuda"}.get(self.exchange, self.device)
        if self.ranks > 1 and self.device != needed:
            raise UserError(f"exchange is {self.exchange!r}, for ranks on {needed}; on {self.device} use auto")
        sizes = ("max_batch_tokens", "max_requests", "max_model_len", "block_size", "num_blocks")
        for key in ("ranks", "threads", "stall_seconds", *sizes):
            if (value := getattr(self, key)) is not None and value < 1:
                raise UserError(f"{key} is {value}; it must be at least 1")
        if not 0 <= self.capacity_factor < float("inf"):
            raise UserError(f"capacity_factor is {self.capacity_factor}; use 0 (a row for every token) or, say, 1.25")
        if self.probe_tokens < 0:
            raise UserError(f"probe_tokens is {self.probe_tokens}; it must be at least 0 (requests are not moved)")
        if self.record_tokens < 0:
            raise UserError(f"record_tokens is {self.record_tokens}; it must be at least 0 (nothing is recorded)")
        if self.threads is not None and self.threads > MOST_THREADS:
            raise UserError(
                f"threads is {self.threads}; use at most {MOST_THREADS}, better no more than there are cores"
            )
        if self.max_requests > MOST_REQUESTS:
            raise UserError(f"max_requests is {self.max_requests}; use at most {MOST_REQUESTS} for one rank")
        if self.max_requests > self.max_batch_tokens:
            raise UserError(
                f"max_requests {self.max_requests} is above max_batch_tokens {self.max_batch_tokens}: a decode step"
                " takes a token per request; raise max_batch_tokens or lower max_requests"
            )
        if self.deterministic and self.combine != "exact":
            raise UserError(f"combine is {self.combine!r}, deterministic mode needs 'exact'; drop one of the two")
        if self.num_blocks is not None and self.num_blocks * self.block_size < self.max_model_len:
            raise UserError(
                f"num_blocks {self.num_blocks} x block_size {self.block_size} holds fewer tokens than max_model_len"
                f" {self.max_model_len}; raise num_blocks or lower max_model_len"
            )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str, source: str = "engine config") -> EngineConfig:
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{source} is not JSON ({error}); expected an object of engine settings") from None
        return EngineConfig.from_dict(raw, source)

    @staticmethod
    def from_dict(raw: Mapping[str, Any], source: str = "engine config") -> EngineConfig:
        known = [item.name for item in fields(EngineConfig)]
        if not isinstance(raw, Mapping):
            raise UserError(f"{source} is a {type(raw).__name__}, expected an object with keys of {known}")
        if unknown := sorted(set(raw) - set(known)):
            raise UserError(f"{source} has unknown keys {unknown}; known are {known}")
        if "model" not in raw:
            raise UserError(f"{source} lacks 'model'; give the checkpoint's folder")
        return EngineConfig(**raw)


def check_engine(engine: EngineConfig, model: ModelConfig) -> None:
    """Raise ``UserError`` where the engine's settings do not fit the model."""
    if engine.ranks > model.num_experts:
        raise UserError(
            f"ranks is {engine.ranks}, the model has {model.num_experts} experts a layer and every rank needs one;"
            f" use at most {model.num_experts} ranks"
        )
    if engine.wire == "fp8" and model.hidden_size % 128:
        raise UserError(
            f"wire is 'fp8', which scales runs of 128 columns; hidden size {model.hidden_size}: use 'model'"
        )
    if engine.max_model_len > model.max_position_embeddings:
        raise UserError(
            f"max_model_len is {engine.max_model_len}, the model's positions end at {model.max_position_embeddings};"
            " lower it"
        )


def _check_type(key: str, value: object, annotation: str) -> None:
    kinds = {"str": str, "int": int, "float": float, "bool": bool, "None": type(None)}
    allowed = [name.strip() for name in annotation.split("|")]
    if "float" in allowed:
        allowed.append("int")
    if type(value) not in [kinds[name] for name in allowed]:
        raise UserError(f"{key} is {value!r}; it must be of type {' or '.join(allowed)}")


@dataclass(frozen=True)
class RankInfo:
    """Who a rank is and whom it talks to; made by ``launch`` from the environment or the spawner.

    ``init_method``: rendezvous of the process group (``file://`` or ``tcp://``).  ``requests_addr``: where rank 0
    pulls requests; ``outputs_addr``: where every rank pushes outputs.  ``run_dir``: folder for error files; where it is
    empty they are printed.  ``error_file``: torchrun's, filled too when the rank fails.
    """

    rank: int
    world: int
    local_rank: int
    init_method: str
    requests_addr: str
    outputs_addr: str
    run_dir: str
    error_file: str = ""
