"""What becomes of a trained embedded model: checkpoint, check against transformers, losses, samples, traces, card."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from demo_card import card
from demo_data import END, SHARES, entropies
from demo_net import DemoNet, exported, hf_config
from record_transformers_trace import Recorder
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from placement.plan import MoEShape
from placement.trace import Trace

NAME = "epmoe-demo"
TRACE_SEQUENCES, TRACE_LENGTH = 48, 512  # per domain
PROMPTS = {
    "english": "To change the font of the selected text,",
    "german": "Um die Schriftart des ausgewählten Textes zu ändern,",
    "french": "Pour modifier la police du texte sélectionné,",
    "python": 'def get_model(self, name, default=None):\n    """',
    "c": "int\nmain (int argc, char **argv)\n{\n",
    "go": "// Close closes the file.\nfunc (f *File) Close() error {\n",
}


@dataclass(frozen=True)
class Made:
    """A finished run: the net, its tokens by domain, and ``facts`` (recipe, cost) for the record."""

    net: DemoNet
    tokenizer: Tokenizer
    train: dict[str, np.ndarray]
    heldout: dict[str, np.ndarray]
    facts: dict


def publish(made: Made, args: argparse.Namespace) -> bool:
    """Write all that ships to ``args.out``; False if a check failed (each says so)."""
    out: Path = args.out
    write_checkpoint(made, out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).to(args.device).eval()
    difference = parity(made, out)
    domains = {}
    for domain, tokens in made.heldout.items():
        loss, predicted = heldout_loss(model, tokens, made.net.shape.context)
        text_bytes = len(made.tokenizer.decode(tokens.tolist(), skip_special_tokens=False).replace(END, "").encode())
        domains[domain] = {
            "loss": round(loss, 4),
            "bits_per_byte": round(loss * predicted / math.log(2) / text_bytes, 4),
            **{
                key: round(value, 4)
                for key, value in entropies(made.train[domain], tokens, made.net.shape.vocab).items()
            },
            "heldout_tokens": len(tokens),
            "train_tokens": len(made.train[domain]),
        }
        print(json.dumps({domain: domains[domain]}), flush=True)
        record_trace(model, tokens, out, domain)
    samples = {domain: continuation(model, made.tokenizer, prompt) for domain, prompt in PROMPTS.items()}
    metrics = {"name": NAME, **made.facts, "max_logit_difference": difference, "domains": domains}
    manifest = json.loads((args.corpus / "manifest.json").read_text())
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    (out / "MODEL_CARD.md").write_text(card(metrics, samples, manifest))
    for domain, text in samples.items():
        print(f"--- {domain}\n{text}", flush=True)
    return check(metrics, args.expect)


def write_checkpoint(made: Made, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    save_file(exported(made.net), out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    (out / "config.json").write_text(json.dumps(hf_config(made.net.shape), indent=1) + "\n")
    made.tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "model_max_length": made.net.shape.context,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


@torch.no_grad()
def parity(made: Made, out: Path) -> float:
    """Largest difference of float32 logits from transformers', over the largest logit, on held-out text of each domain.

    The net takes on the exported (rounded) weights first, so that only the mathematics is compared.
    """
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    ours = DemoNet(made.net.shape, 0).eval()
    ours.load_state_dict(
        {name: tensor.bfloat16().float().cpu() for name, tensor in made.net.state_dict().items()}, strict=False
    )
    length = min(256, made.net.shape.context)
    token_BS = torch.stack([torch.from_numpy(tokens[:length].astype(np.int64)) for tokens in made.heldout.values()])
    expected = theirs(token_BS).logits
    return ((ours.logits(token_BS)[0] - expected).abs().max() / expected.abs().max()).item()


@torch.inference_mode()
def heldout_loss(model: torch.nn.Module, tokens: np.ndarray, context: int, batch: int = 32) -> tuple[float, int]:
    """(mean nats per predicted token, predicted tokens) over windows of ``context`` tokens that do not overlap."""
    total, predicted = 0.0, 0
    windows = [tokens[start : start + context] for start in range(0, len(tokens) - 1, context)]
    groups = [windows[i : i + batch] for i in range(0, len(windows) - 1, batch)] + [windows[-1:]]
    for group in groups:
        group = group if len(group[-1]) == len(group[0]) else group[:-1]  # the short last window goes alone
        token_BS = torch.from_numpy(np.stack(group).astype(np.int64)).to(model.device)
        logits_NV = model(token_BS, use_cache=False).logits[:, :-1].flatten(0, 1).float()
        target_N = token_BS[:, 1:].flatten()
        total += torch.nn.functional.cross_entropy(logits_NV, target_N, reduction="sum").item()
        predicted += len(target_N)
    return total / predicted, predicted


@torch.inference_mode()
def record_trace(model: torch.nn.Module, tokens: np.ndarray, out: Path, domain: str) -> None:
    """Routing of sequences spread evenly over the held-out text, as ``trace_DOMAIN.npz``."""
    length = min(TRACE_LENGTH, model.config.max_position_embeddings)
    count = min(TRACE_SEQUENCES, len(tokens) // length)
    starts = np.linspace(0, len(tokens) - length, count).astype(int)
    recorder, blocks = Recorder(model), []
    token_BS = np.stack([tokens[start : start + length] for start in starts])
    for sequence_S in token_BS:
        model(torch.from_numpy(sequence_S.astype(np.int64)).to(model.device)[None], use_cache=False)
        blocks.append(recorder.take())
    config = model.config
    shape = MoEShape(recorder.layers, config.num_experts, config.num_experts_per_tok, NAME)
    sha256 = hashlib.sha256((out / "tokenizer.json").read_bytes()).hexdigest()
    Trace(
        shape,
        np.concatenate(blocks).astype(np.uint8),
        np.full(count, length, np.int32),
        token_ids_T=token_BS.flatten().astype(np.uint32),
        tokenizer_sha256=sha256,
    ).save(out / f"trace_{domain}.npz")


@torch.inference_mode()
def continuation(model: torch.nn.Module, tokenizer: Tokenizer, prompt: str, new_tokens: int = 90) -> str:
    """The prompt and what follows, sampled at temperature 0.8 from the likeliest 90 %; the seed is fixed."""
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    torch.manual_seed(0)
    options = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 0, "pad_token_id": 0}
    made = model.generate(
        torch.tensor([ids], device=model.device),
        max_length=None,
        max_new_tokens=min(new_tokens, model.config.max_position_embeddings - len(ids)),
        **options,
    )
    return tokenizer.decode(made[0].tolist())


def check(metrics: dict, expect: Path | None) -> bool:
    """Print what does not hold of: parity, below bigram entropy, within 1 % of the expected losses."""
    wrong = []
    if metrics["max_logit_difference"] > 1e-4:
        wrong.append(f"logits differ from transformers' by {metrics['max_logit_difference']:.1e} of the largest")
    expected = json.loads(expect.read_text())["domains"] if expect else {}
    for domain, found in metrics["domains"].items():
        if found["loss"] >= found["bigram"]:
            wrong.append(f"{domain}: loss {found['loss']} is not below the bigram entropy {found['bigram']}")
        if domain in expected and abs(found["loss"] / expected[domain]["loss"] - 1) > 0.01:
            wrong.append(f"{domain}: loss {found['loss']}, expected {expected[domain]['loss']} within 1 %")
    print("\n".join(wrong) or f"all checks hold over {', '.join(SHARES)}", flush=True)
    return not wrong
