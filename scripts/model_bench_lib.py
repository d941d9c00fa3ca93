"""What the whole-model benchmarks share: the model's shape with random weights, what a step must read and compute, the
machine's ceilings, and where a step's time goes."""

from __future__ import annotations

import cProfile
import json
import pstats
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from epmoe.checkpoint import Loader, LoadReport
from epmoe.comm import Comm
from epmoe.config import EngineConfig
from epmoe.engine.engine import Engine
from epmoe.engine.kv_cache import block_bytes
from epmoe.layout import empty_weights
from epmoe.model.weights import ModelWeights
from epmoe.model_config import ModelConfig

QWEN3_30B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attention_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}

NAMINGS = (  # first match wins; parts of a step by the names of their kernels
    ("expert gate and up", r"gate_up"),
    ("expert down", r"_down|down_"),
    ("attention", r"attend|attention|_merge_|flash|fmha"),
    ("norms", r"norm"),
    ("rotary and KV write", r"qkv"),
    ("router", r"route_kernel"),
    ("pairs to experts", r"_place_|_count_kernel|_schedule|index_build|histogram"),
    ("expert sum", r"weighted_sum|combine"),
    ("linear (qkv, o, router logits, head)", r"gemm|gemv|nvjet|cutlass|splitK|cublas|_linear|^_vector_kernel"),
    ("sampling", r"_draw_|_pick_|_cut_"),
)


def shape_folder(layers: int | None = None) -> str:
    """A folder with the config.json of the shape (and nothing else), cut to fewer layers for a rehearsal."""
    folder = Path(tempfile.mkdtemp(prefix="qwen3-30b-shape-"))
    settings = dict(QWEN3_30B) if layers is None else {**QWEN3_30B, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(settings))
    return str(folder)


@torch.inference_mode()
def random_load(
    folder: Path, config: ModelConfig, local: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> tuple[ModelWeights, LoadReport]:
    """In place of `load_weights`: normal weights of variance 1 / fan-in, norms of one, made on the device."""
    began = time.perf_counter()
    torch.manual_seed(0)
    weights, _ = empty_weights(config, local, dtype, device)
    tensors = [*tensors_of(weights)]
    for tensor in tensors:
        if tensor.dim() == 1:
            tensor.fill_(1)
        else:
            tensor.normal_(0, tensor.shape[-1] ** -0.5)
    weights.embed.mul_(tensors[0].shape[-1] ** 0.5)
    size = sum(tensor.nbytes for tensor in tensors)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return weights, LoadReport(0, size, len(tensors), 0, 0, time.perf_counter() - began)


def tensors_of(value: object):
    """All tensors of weights, depth first."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from tensors_of(each)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_of(getattr(value, name))


def kept(load: Loader) -> Loader:
    """The loader, that hands out the same weights again when asked again."""
    made = []

    def once(*where):
        made.append(load(*where) if not made else made[0])
        return made[0]

    return once


def open_engine(folder: str, device: str, load: Loader = random_load, **settings) -> Engine:
    """An engine of one rank, by default over random weights."""
    config = EngineConfig(model=folder, device=device, dtype="bfloat16", **settings)
    return Engine(config, Comm(0, 1, torch.device(device)), load)


def random_requests(vocabulary: int, count: int, length: int, max_tokens: int, first_id: int, seed: int) -> list[dict]:
    rng = np.random.default_rng(seed)
    params = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
    return [
        {"op": "add", "id": first_id + n, "prompt": rng.integers(0, vocabulary, length).tolist(), "params": params}
        for n in range(count)
    ]


# -- what must be read and computed ---------------------------------------------------------------------------------


def decode_bytes(config: ModelConfig, active_experts: float, sequences: int, context: float) -> float:
    """Bytes (bf16) that one decode step must read: every weight it uses once, and every sequence's keys and values.

    ``active_experts``: mean over layers of the experts chosen by any token of the step.
    """
    attention, expert = _layer_weights(config)
    router = config.num_experts * config.hidden_size
    weights = (
        config.num_layers * (attention + router + active_experts * expert) + config.vocab_size * config.hidden_size
    )
    return 2 * weights + sequences * context * block_bytes(config, 1, torch.bfloat16)


def prefill_flops(config: ModelConfig, chunks: Sequence[tuple[int, int]], sampled: int) -> float:
    """Flops of chunks ``(first position, tokens)``: linear layers, causal half of attention, head on sampled tokens."""
    attention, expert = _layer_weights(config)
    per_token = attention + config.num_experts * config.hidden_size + config.top_k * expert
    tokens = sum(count for _, count in chunks)
    pairs = sum(count * start + count * (count + 1) / 2 for start, count in chunks)  # (query, visible key)
    linear = 2.0 * tokens * config.num_layers * per_token
    scores = 4.0 * pairs * config.num_layers * config.num_heads * config.head_dim
    return linear + scores + 2.0 * sampled * config.vocab_size * config.hidden_size


def _layer_weights(config: ModelConfig) -> tuple[int, int]:
    """Elements of a layer's qkv and o, and of one expert."""
    heads = config.num_heads * config.head_dim
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return config.hidden_size * (qkv + heads), 3 * config.hidden_size * config.moe_intermediate_size


# -- the machine ------------------------------------------------------------------------------------------------------


def ceilings() -> dict:
    """Matrix product 8192^3 in bf16 (TFLOP/s, in a burst and after 0.3 s of it) and copy (TB/s, read and written)."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(1 << 30, device="cuda", dtype=torch.bfloat16).normal_()
    target = torch.empty_like(source)
    torch.mm(a, b)
    torch.cuda.synchronize()
    time.sleep(0.2)
    product = lambda: torch.mm(a, b)  # noqa: E731
    flops = 2 * 8192**3
    burst = flops / device_seconds(product, 5) / 1e12
    device_seconds(product, 200)
    sustained = flops / device_seconds(product, 50) / 1e12
    copy = 2 * source.nbytes / device_seconds(lambda: target.copy_(source), 20) / 1e12
    return {"burst_tflops": burst, "sustained_tflops": sustained, "copy_tbs": copy}


def device_seconds(function: Callable[[], object], count: int) -> float:
    """Seconds of one call, back to back, by events."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        function()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3 / count


def clocks() -> str:
    """SM and memory clock, power and temperature, as nvidia-smi says."""
    fields = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid  # its number is not the one seen here
    command = ["nvidia-smi", f"--id=GPU-{gpu}", f"--query-gpu={fields}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


# -- where a step's time goes -----------------------------------------------------------------------------------------


def kernel_breakdown(run: Callable[[], object], steps: int) -> dict:
    """Device microseconds per step by part, over ``steps`` calls; ``kernels`` and copies ``to_host`` a step.

    A kernel may start while the one before it still runs (programmatic dependent launch) and wait there; its time is
    counted from the end of the one before, so that the parts add up to the time in which any kernel ran.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    total: dict[str, list[float]] = {}
    end = 0.0
    for event in sorted(device, key=lambda event: event.time_range.start):
        entry = total.setdefault(event.name, [0.0, 0])
        entry[0] += max(0.0, event.time_range.end - max(event.time_range.start, end)) / steps
        entry[1] += 1 / steps
        end = max(end, event.time_range.end)
    parts: dict[str, float] = {}
    for name, (us, _) in total.items():
        part = next((part for part, pattern in NAMINGS if re.search(pattern, name)), "other")
        parts[part] = parts.get(part, 0.0) + us
    top = sorted(total.items(), key=lambda item: -item[1][0])[:24]
    return {
        "us": dict(sorted(parts.items(), key=lambda item: -item[1])),
        "kernels": sum(count for _, count in total.values()),
        "to_host": sum(count for name, (_, count) in total.items() if name.startswith("Memcpy DtoH")),
        "top": [(name[:90], round(us, 1), round(count)) for name, (us, count) in top],
    }


def host_breakdown(run: Callable[[], object], steps: int) -> list[tuple[str, float, float]]:
    """(function, microseconds a step in itself, calls a step) on the host, longest first, profiler cost included."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(steps):
        run()
    profile.disable()
    found = pstats.Stats(profile).stats.items()
    rows = [
        (f"{Path(file).name}:{line} {name}", own * 1e6 / steps, calls / steps)
        for (file, line, name), (_, calls, own, _, _) in found
    ]
    return sorted(rows, key=lambda row: -row[1])[:30]
