#!/usr/bin/env python3
"""Generation on CPU ranks: epmoe against transformers' continuous batching, same model, prompts, lengths and threads.

    python scripts/bench_generate.py --model FOLDER
    python scripts/bench_generate.py --random-300m --json docs/results/generate.json

Four runs, each in fresh processes, the clock started when weights are loaded and one short request has been served:

* epmoe: W gloo ranks, one thread each, and once more in deterministic mode;
* transformers EP: W gloo processes, one thread each, DistributedConfig(tp_size=W, ep_size=W);
* transformers: one process with W threads.

Greedy, float32.  The token ids must agree; otherwise the script says where they part and prints no ratio.
transformers needs accelerate for this (pip install accelerate psutil).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from placement.errors import UserError


@dataclass(frozen=True)
class Workload:
    """``prompts`` are token ids; every request generates exactly ``new_tokens``."""

    model: str
    prompts: list[list[int]]
    new_tokens: int
    ranks: int


@dataclass(frozen=True)
class Run:
    """One measured run; ``note`` is what else there is to know."""

    name: str
    seconds: float
    tokens_per_s: float
    token_ids: list[list[int]]
    note: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="a checkpoint folder")
    which.add_argument("--random-300m", action="store_true", help="a random Qwen3-MoE of about 300M parameters")
    which.add_argument("--peer", help=argparse.SUPPRESS)  # this script as a transformers process; not for people
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=2, help="processes of one thread each (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and random weights")
    parser.add_argument("--json", metavar="FILE", help="write the result there too")
    args = parser.parse_args()
    if args.peer:
        return peer(Path(args.peer))
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = random_model(Path(folder), args.seed) if args.random_300m else args.model
            work = Workload(model, random_prompts(model, args.requests, args.seed), args.new_tokens, args.ranks)
            runs = [run_epmoe(work), run_epmoe(work, deterministic=True)]
            runs += [run_peer(work, Path(folder), args.ranks), run_peer(work, Path(folder), 1)]
        except UserError as error:
            print(f"bench_generate: {error}", file=sys.stderr)
            return 2
    name = "random Qwen3-MoE, 300M" if args.random_300m else Path(args.model).name
    return show(name, work, runs, args.json)


def show(name: str, work: Workload, runs: list[Run], json_file: str | None) -> int:
    lengths = [len(prompt) for prompt in work.prompts]
    print(f"{name}: {len(lengths)} requests, prompts of {min(lengths)} to {max(lengths)} tokens, {work.new_tokens} new")
    for run in runs:
        print(f"  {run.name:<34} {run.seconds:7.2f} s  {run.tokens_per_s:8.1f} tokens/s   {run.note}")
    for run in runs[1:]:
        if differing := [i for i, ids in enumerate(run.token_ids) if ids != runs[0].token_ids[i]]:
            print(f"{run.name} draws other tokens in requests {differing[:8]}: no ratio is printed", file=sys.stderr)
            return 1
    best = max(runs[2:], key=lambda run: run.tokens_per_s)
    ratio, cost = runs[0].tokens_per_s / best.tokens_per_s, runs[1].seconds / runs[0].seconds
    print(f"  tokens agree; epmoe is {ratio:.2f}x the better transformers figure ({best.name})")
    print(f"  deterministic mode takes {cost:.2f}x the time of the ordinary one")
    if json_file:
        rows = [{key: value for key, value in asdict(run).items() if key != "token_ids"} for run in runs]
        machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
        record = {"model": name, "date": str(date.today()), "machine": machine, "ratio": ratio}
        record["deterministic_cost"] = cost
        record["runs"] = rows
        Path(json_file).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def random_model(folder: Path, seed: int) -> str:
    """A Qwen3-MoE of about 300M random float32 parameters, scaled so that its experts matter to the output."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=8192, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4,
        head_dim=64, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=272, norm_topk_prob=True,
        max_position_embeddings=2048, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed" not in name:
                weight.mul_(2)
    model.save_pretrained(folder / "random")
    return str(folder / "random")


def random_prompts(model: str, count: int, seed: int) -> list[list[int]]:
    import numpy as np

    from epmoe.config import ModelConfig

    rng = np.random.default_rng(seed)
    vocabulary = ModelConfig.from_folder(model).vocab_size
    return [rng.integers(1, vocabulary, int(n)).tolist() for n in rng.integers(32, 257, count)]


def run_epmoe(work: Workload, deterministic: bool = False) -> Run:
    from epmoe.config import EngineConfig
    from launch.session import Session, spawned

    params = {"temperature": 0.0, "max_tokens": work.new_tokens, "ignore_eos": True}
    sizes = {"max_batch_tokens": 512, "max_model_len": 512}
    engine = EngineConfig(work.model, ranks=work.ranks, threads=1, deterministic=deterministic, **sizes)
    with Session(spawned(work.ranks), engine, print) as session:
        session.wait_ready()
        collect(session, [session.add(work.prompts[0][:8], {**params, "max_tokens": 2})])
        started = time.perf_counter()
        ids = [session.add(prompt, params) for prompt in work.prompts]
        tokens = collect(session, ids)
        seconds = time.perf_counter() - started
        stats = session.stop()
    spent = [1e6 * (s["seconds_in_steps"] - s["model_seconds"]) / s["forwards"] for s in stats.values()]
    note = f"{min(spent):.0f} us a step beside the model (scheduling, agreement)"
    name = f"epmoe, {work.ranks} ranks" + ", deterministic" * deterministic
    return Run(name, seconds, rate(work, seconds), [tokens[i] for i in ids], note)


def collect(session, ids: list[int]) -> dict[int, list[int]]:
    tokens = {i: [] for i in ids}
    left = set(ids)
    while left:
        for event in session.events():
            tokens[event.id] += event.token_ids
            if event.finish_reason:
                left.discard(event.id)
    return tokens


def rate(work: Workload, seconds: float) -> float:
    return len(work.prompts) * work.new_tokens / seconds


def run_peer(work: Workload, folder: Path, processes: int) -> Run:
    """transformers in ``processes`` processes that share ``work.ranks`` threads."""
    job, answer = folder / "job.json", folder / "answer.json"
    job.write_text(json.dumps({**asdict(work), "processes": processes, "answer": str(answer)}), encoding="utf-8")
    command = [sys.executable, __file__, "--peer", str(job)]
    if processes > 1:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", *command[1:]]
    threads = str(work.ranks // processes)
    env = {**os.environ, "OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"transformers in {processes} processes failed:\n{done.stderr[-3000:]}")
    result = json.loads(answer.read_text(encoding="utf-8"))
    name = f"transformers EP, {processes} processes" if processes > 1 else f"transformers, {threads} threads"
    return Run(name, result["seconds"], rate(work, result["seconds"]), result["token_ids"], result["note"])


def peer(job: Path) -> int:
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    work = json.loads(job.read_text(encoding="utf-8"))
    rank, processes = int(os.environ.get("RANK", 0)), work["processes"]
    torch.set_num_threads(work["ranks"] // processes)
    extra = {}
    if processes > 1:
        from transformers.distributed import DistributedConfig

        extra["distributed_config"] = DistributedConfig(tp_size=processes, ep_size=processes)
    model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32, **extra).eval()
    note = f"{local_experts(model)} experts a process and layer"
    settings = GenerationConfig(max_new_tokens=work["new_tokens"], do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(num_blocks=256, max_batch_tokens=512)

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        done = model.generate_batch(prompts, settings, batching)
        return [done[key].generated_tokens for key in sorted(done, key=lambda k: int(k.rsplit("_", 1)[-1]))]

    generate([work["prompts"][0][:8]])
    started = time.perf_counter()
    token_ids = generate(work["prompts"])
    seconds = time.perf_counter() - started
    if rank == 0:
        answer = {"seconds": seconds, "token_ids": token_ids, "note": note}
        Path(work["answer"]).write_text(json.dumps(answer), encoding="utf-8")
    return 0


def local_experts(model) -> int:
    """Experts that this process really holds in its first MoE layer."""
    for name, weight in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            return local.shape[0]
    raise AssertionError("no expert weights found")


if __name__ == "__main__":
    sys.exit(main())
