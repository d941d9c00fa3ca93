"""Trains the model that ships in ``epmoe/demo_model``: Qwen3-MoE format, six domains, a few minutes on one GPU.

    python scripts/demo_corpus.py --out .corpus
    python scripts/train_demo_model.py --corpus .corpus --work .demo --out .demo/model

``--expect epmoe/demo_model/metrics.json`` compares the losses with those of the model that ships.
A run that was stopped goes on from the last checkpoint in ``--work`` when it is started again with the same arguments.
The seed fixes initialisation and the order of the data. On a CPU it works and takes very long; ``--tiny`` is a model
of seconds that shows the whole way.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from demo_data import SHARES, BatchOrder, token_stream, train_tokenizer
from demo_net import DemoNet, Shape, optimizers
from demo_report import Made, publish
from tokenizers import Tokenizer

SAVE_EVERY = 500  # steps


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result, beside the corpus."""

    shape: Shape
    steps: int
    batch: int
    micro_batch: int
    lr: float
    warmup: int = 100
    balance: float = 0.01
    seed: int = 0

    def lr_at(self, step: int) -> float:
        """Linear warm-up, then linear to 0 at the last step."""
        return self.lr * min((step + 1) / self.warmup, (self.steps - step) / (self.steps - self.warmup), 1.0)


def main() -> None:
    args = parse()
    recipe = recipe_of(args)
    tokenizer = load_tokenizer(args.corpus, args.work, recipe.shape.vocab)
    began = time.time()
    train, heldout = (
        [token_stream(args.corpus, domain, part, tokenizer, args.work) for domain in SHARES]
        for part in ("train", "heldout")
    )
    report("tokens", {name: [len(a), len(b)] for name, a, b in zip(SHARES, train, heldout)}, began)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS then repeats its sums
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    net = DemoNet(recipe.shape, recipe.seed).to(args.device)
    made = Made(
        net,
        tokenizer,
        dict(zip(SHARES, train)),
        dict(zip(SHARES, heldout)),
        {"recipe": asdict(recipe), "cost": fit(net, train, recipe, args)},
    )
    if not publish(made, args):
        sys.exit(1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder written by demo_corpus.py")
    parser.add_argument("--work", type=Path, required=True, help="folder for tokens and checkpoints")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model, its card and its traces")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--batch", type=int, default=64, help="sequences per step")
    parser.add_argument("--micro-batch", type=int, default=64, help="sequences at once on the device; divides --batch")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", action="store_true", help="noisy top-k gating with a learned spread")
    parser.add_argument("--tiny", action="store_true", help="2 layers of 4 experts, context 64: to try the script")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--expect", type=Path, help="metrics.json of another run: fail if a loss differs by over 1 %%")
    args = parser.parse_args()
    if args.batch % args.micro_batch:
        parser.error(f"--micro-batch {args.micro_batch} does not divide --batch {args.batch}")
    return args


def recipe_of(args: argparse.Namespace) -> Recipe:
    shape = Shape(noise=args.noise)
    if args.tiny:
        shape = Shape(
            512,
            32,
            layers=2,
            heads=2,
            kv_heads=1,
            head_dim=16,
            experts=4,
            expert_hidden=16,
            context=64,
            noise=args.noise,
        )
    warmup = min(100, max(1, args.steps // 10))
    return Recipe(shape, args.steps, args.batch, args.micro_batch, args.lr, warmup, seed=args.seed)


def load_tokenizer(corpus: Path, work: Path, vocab: int) -> Tokenizer:
    """The tokenizer of this corpus, trained on first use."""
    manifest = hashlib.sha256((corpus / "manifest.json").read_bytes()).hexdigest()[:16]
    kept = work / f"tokenizer.{vocab}.{manifest}.json"
    if not kept.is_file():
        work.mkdir(parents=True, exist_ok=True)
        train_tokenizer(corpus, vocab).save(str(kept))
    return Tokenizer.from_file(str(kept))


def fit(net: DemoNet, train: list[np.ndarray], recipe: Recipe, args: argparse.Namespace) -> dict:
    """Train ``net`` in place; returns what it cost. Goes on from ``--work/state.pt`` if that is of the same recipe."""
    order = BatchOrder(tuple(map(len, train)), recipe.batch, recipe.shape.context, recipe.seed)
    token_N = torch.from_numpy(np.concatenate(train).astype(np.int32)).to(args.device)
    reach = torch.arange(recipe.shape.context + 1, device=args.device)
    steppers = optimizers(net, recipe.lr)
    forward = net if args.no_compile else torch.compile(net)
    autocast = torch.autocast(args.device.split(":")[0], torch.bfloat16)
    step, spent = resume(net, steppers, recipe, args)
    began = time.time() - spent
    while step < recipe.steps:
        if args.noise:
            torch.manual_seed(recipe.seed * 1_000_003 + step)
        starts = torch.from_numpy(order.starts(step)).to(args.device)
        losses = []
        for some in starts.split(recipe.micro_batch):
            with autocast:
                loss, balance, load_LE = forward(token_N[some[:, None] + reach].long())
            mean = loss / (recipe.batch * recipe.shape.context)
            (mean + recipe.balance * balance * len(some) / recipe.batch).backward()
            losses.append(mean.detach())
        for stepper in steppers:
            for group in stepper.param_groups:
                group["lr"] = recipe.lr_at(step)
            stepper.step()
            stepper.zero_grad()
        step += 1
        if step % 100 == 0 or step in (1, 10, recipe.steps):
            tail = (load_LE.max(1).values / load_LE.float().mean(1)).mean().item()
            loss = round(sum(losses).item(), 4)
            report("step", {"step": step, "loss": loss, "fullest expert over mean": round(tail, 2)}, began)
        if step % SAVE_EVERY == 0 or step == recipe.steps:
            save(net, steppers, recipe, step, time.time() - began, args)
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    tokens = recipe.steps * recipe.batch * recipe.shape.context
    return {"seconds": round(time.time() - began, 1), "device": name, "tokens": tokens, "torch": torch.__version__}


def save(net, steppers, recipe: Recipe, step: int, spent: float, args: argparse.Namespace) -> None:
    state = {
        "recipe": asdict(recipe),
        "step": step,
        "spent": spent,
        "net": net.state_dict(),
        "steppers": [stepper.state_dict() for stepper in steppers],
    }
    torch.save(state, args.work / "state.pt.part")
    (args.work / "state.pt.part").replace(args.work / "state.pt")


def resume(net, steppers, recipe: Recipe, args: argparse.Namespace) -> tuple[int, float]:
    """(next step, seconds spent so far)."""
    path = args.work / "state.pt"
    if not path.is_file():
        return 0, 0.0
    state = torch.load(path, map_location=args.device, weights_only=True)
    if state["recipe"] != asdict(recipe):
        sys.exit(f"{path} is of another recipe: {state['recipe']}; give its arguments, or another --work")
    net.load_state_dict(state["net"])
    for stepper, kept in zip(steppers, state["steppers"]):
        stepper.load_state_dict(kept)
    return state["step"], state["spent"]


def report(kind: str, values: dict, began: float) -> None:
    print(json.dumps({kind: values, "seconds": round(time.time() - began, 1)}), flush=True)


if __name__ == "__main__":
    main()
