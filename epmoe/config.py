"""The three frozen configurations: of the model (from its folder), of the engine (from the user), of one rank.

``ModelConfig`` is read from a checkpoint's folder, ``EngineConfig`` is made at the edge from the user's choices.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from epmoe.families import FAMILIES, Family
from epmoe.hf_config import read_settings
from epmoe.ops.router import RouterRule
from placement.errors import UserError
from placement.plan import MoEShape

MOST_REQUESTS = 1 << 16
DTYPES = ("float32", "bfloat16", "float16")
EXCHANGES = ("auto", "alltoall", "oneshot", "padded", "p2p")


@dataclass(frozen=True)
class ModelConfig:
    """What the model computes.  Sizes are counts of elements; letters as in the package legend.

    ``qk_norm``: None, "head" (RMS norm over each head's d) or "full" (over the whole projection), before rotary.
    ``clip_qkv``: q, k and v are clamped to +-clip_qkv after the norm.  ``rotary_dim``: leading elements of a head that
    rotate.  ``intermediate_size``: of dense layers (those not in ``moe_layers``).  ``shared_intermediate_size``:
    summed over the shared experts, None without.  ``block_fp8``: matrices may be stored as 8-bit floats with a
    scale for each block of 128 x 128.  ``config_sha256``: of every field that changes the maths.
    """

    family: str
    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    max_position_embeddings: int
    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int
    moe_intermediate_size: int
    router: RouterRule
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: str | None = None
    clip_qkv: float | None = None
    intermediate_size: int | None = None
    shared_intermediate_size: int | None = None
    shared_gate: bool = False
    block_fp8: bool = False
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    config_sha256: str = ""

    @property
    def moe_shape(self) -> MoEShape:
        return MoEShape(self.moe_layers, self.num_experts, self.top_k, self.name, self.config_sha256)

    @staticmethod
    def from_folder(folder: str | Path, name: str = "") -> ModelConfig:
        """Read ``config.json`` (and the end tokens of ``generation_config.json``) of a checkpoint folder."""
        folder = Path(folder)
        return model_config(read_settings(folder), name or folder.resolve().name, str(folder / "config.json"))


def model_config(settings: Mapping[str, Any], name: str, source: str = "config.json") -> ModelConfig:
    """The config of checked settings (``hf_config.normalise``); ``source`` names the file in errors."""
    try:
        family = FAMILIES[settings["model_type"]]
        _check_sizes(settings, family)
        return _from_settings(settings, family, name)
    except KeyError as error:
        raise UserError(f"{source} lacks {error.args[0]!r}, which {settings['model_type']} needs; add it") from None
    except UserError as error:
        raise UserError(f"{source}: {error}") from None


def _from_settings(settings: Mapping[str, Any], family: Family, name: str) -> ModelConfig:
    heads, hidden = settings["num_attention_heads"], settings["hidden_size"]
    head_dim = settings["head_dim"] or hidden // heads
    eos = settings.get("eos_token_id")
    values = {
        "family": settings["model_type"],
        "name": name,
        "hidden_size": hidden,
        "num_layers": settings["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": settings["num_key_value_heads"] or heads,
        "head_dim": head_dim,
        "vocab_size": settings["vocab_size"],
        "rms_norm_eps": float(settings["rms_norm_eps"]),
        "rope_theta": float(settings["rope_theta"]),
        "rotary_dim": int(head_dim * (settings.get("partial_rotary_factor") or 1)),
        "max_position_embeddings": settings["max_position_embeddings"],
        "moe_layers": family.moe_layers(settings),
        "num_experts": settings["num_experts"],
        "top_k": settings["num_experts_per_tok"],
        "moe_intermediate_size": settings[family.expert_size_key],
        "router": family.router(settings),
        "hidden_act": "silu",
        "tie_word_embeddings": bool(settings["tie_word_embeddings"]),
        "qkv_bias": bool(family.qkv_bias_key and settings[family.qkv_bias_key]),
        "o_bias": bool(family.o_bias_key and settings[family.o_bias_key]),
        "qk_norm": family.qk_norm,
        "clip_qkv": settings.get("clip_qkv"),
        "shared_intermediate_size": settings[family.shared_size_key] if family.shared_size_key else None,
        "shared_gate": family.shared_gate,
        "block_fp8": settings.get("quantization_config") is not None,
        "eos_token_ids": tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        "dtype": str(settings.get("dtype") or "float32").removeprefix("torch."),
    }
    if len(values["moe_layers"]) < values["num_layers"]:
        values["intermediate_size"] = settings["intermediate_size"]
    _check_values(values)
    return ModelConfig(**values, config_sha256=_sha256(values))


def _check_sizes(settings: Mapping[str, Any], family: Family) -> None:
    counts = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")
    experts = ("num_experts", "num_experts_per_tok", family.expert_size_key, family.shared_size_key)
    given = [key for key in ("num_key_value_heads", "head_dim") if settings[key] is not None]
    for key in (*counts, *filter(None, experts), *given):
        if type(settings[key]) is not int or settings[key] < 1:
            raise UserError(f"{key} is {settings[key]!r}; it must be a whole number of at least 1")
    for key in ("rms_norm_eps", "rope_theta"):
        if type(settings[key]) not in (int, float) or settings[key] <= 0:
            raise UserError(f"{key} is {settings[key]!r}; it must be a number above 0")


def _check_values(values: Mapping[str, Any]) -> None:
    if values["num_heads"] % values["num_kv_heads"]:
        raise UserError(
            f"num_key_value_heads {values['num_kv_heads']} does not divide num_attention_heads {values['num_heads']};"
            " correct it"
        )
    if values["top_k"] > values["num_experts"]:
        raise UserError(
            f"num_experts_per_tok is {values['top_k']}, the model has {values['num_experts']} experts; correct it"
        )
    if not values["moe_layers"]:
        raise UserError("no layer is a MoE layer, so nothing can be spread over ranks; serve a MoE checkpoint")
    if values["rotary_dim"] % 2:
        raise UserError(f"head_dim {values['head_dim']} rotates {values['rotary_dim']} elements; it must be even")
    if values["dtype"] not in DTYPES:
        raise UserError(f"dtype is {values['dtype']!r}, implemented are {DTYPES}; convert the checkpoint")


def _sha256(values: Mapping[str, Any]) -> str:
    """Hash of the fields that change the maths; a field at its default is left out, so that new fields keep hashes."""
    cosmetic = {"name", "dtype", "eos_token_ids", "max_position_embeddings", "config_sha256"}
    stated = _stated(ModelConfig, {**values, "router": _stated(RouterRule, asdict(values["router"]))})
    kept = {key: value for key, value in stated.items() if key not in cosmetic}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _stated(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {item.name: item.default for item in fields(kind)}
    return {key: value for key, value in values.items() if defaults[key] is MISSING or value != defaults[key]}


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
        except ValueError as error:
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
    pulls requests; ``outputs_addr``: where every rank pushes outputs.  ``run_dir``: folder for error files.
    ``local_world``: ranks on this machine (0: all).  ``error_file``: torchrun's, filled too when the rank fails.
    """

    rank: int
    world: int
    local_rank: int
    init_method: str
    requests_addr: str
    outputs_addr: str
    run_dir: str
    local_world: int = 0
    error_file: str = ""
