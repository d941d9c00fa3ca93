"""The lowest of eleven published fused-MoE implementations, and how the layer compares with them.

vLLM 0.33, SGLang 0.5, triton_kernels, DeepGEMM, SonicMoE, torch grouped_mm, ScatterMoE, FBGEMM and others, measured on
another H200: uniform routing, whole layer, device time by graph replay, L2 flushed between runs.  That machine's
ceilings were 737 to 772 TFLOP/s (cuBLAS bf16 8192^3) and a copy of 4.29 TB/s; one kernel differed by up to 8 % between
two machines, so the times are also scaled by the ceilings: a case by the one that bounds it.
"""

from __future__ import annotations

from math import exp, log

TOKENS = (1, 16, 64, 256, 1024, 2048, 4096, 8192, 16384)
MICROSECONDS = {
    "mixtral": (197, 661, 678, 748, 1369, 2328, 4405, 9007, 17223),
    "qwen3": (41, 218, 311, 335, 379, 477, 696, 1157, 2122),
    "dsv3-slice": (200, 675, 693, 815, 1373, 2445, 4479, 9411, 18044),
}
TFLOPS, COPY_TBS = 755.0, 4.29


def compare(result: dict, top: dict) -> tuple[float, float] | None:
    """Published time over ours, as measured and scaled by the ceilings; None where nothing was published.

    ``top``: this machine's ceilings; a case that was timed beside a matrix product (``us["mm"]``) has its own.
    """
    ours = result["us"].get("reduce")
    if (
        result["routing"] != "uniform"
        or result["shape"] not in MICROSECONDS
        or result["tokens"] not in TOKENS
        or not ours
    ):
        return None
    published = MICROSECONDS[result["shape"]][TOKENS.index(result["tokens"])]
    tflops = 2 * 8192**3 / result["us"]["mm"] / 1e6 if "mm" in result["us"] else top["tflops"]
    if result["flops"] / TFLOPS > result["bytes"] / COPY_TBS:
        scale = TFLOPS / tflops
    else:
        scale = COPY_TBS / top["copy_tbs"]
    return published / ours, published * scale / ours


def summary(cases: list[dict], top: dict) -> str:
    ratios = {(c["shape"], c["tokens"]): r for c in cases if (r := compare(c, top))}
    if not ratios:
        return "no published times for these cases"
    means = [exp(sum(log(r[i]) for r in ratios.values()) / len(ratios)) for i in (0, 1)]
    low = [f"{name} {tokens} ({r[0]:.2f}, {r[1]:.2f})" for (name, tokens), r in ratios.items() if min(r) < 0.97]
    return (
        f"{len(ratios)} cases, best published over ours: geometric mean {means[0]:.3f}, scaled by the ceilings "
        f"{means[1]:.3f}; below 0.97 (as measured, scaled): {', '.join(low) or 'none'}"
    )
