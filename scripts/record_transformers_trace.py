#!/usr/bin/env python3
"""Record which experts a transformers model chooses, as an epmoe-trace/1 file.

    python scripts/record_transformers_trace.py MODEL_FOLDER text1.txt text2.txt -o domain.npz
    python scripts/record_transformers_trace.py MODEL_FOLDER --like-trace old.npz -o again.npz

The chosen ids are taken where they are used: from the call of each layer's ``experts`` module, after bias, groups and
limits have had their say (router logits alone do not give the choice of sigmoid routers with a correction bias).
Sequences run one at a time, so that no padding is recorded. Text is cut into sequences of equal length; the last,
shorter piece of a file is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from placement.checks import require_sound
from placement.errors import UserError
from placement.plan import MoEShape
from placement.trace import Trace, id_dtype, load_trace


class Recorder:
    """Collects the ids of one forward pass per MoE layer; ``take`` hands them over as ``[T, L, K]``."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.experts_of_layer: dict[int, int] = {}
        self._ids: dict[int, np.ndarray] = {}
        for name, module in model.named_modules():
            match = re.search(r"\blayers\.(\d+)\.", name)
            if match and _chooses(name, module):
                layer = int(match[1])
                if layer in self.experts_of_layer:
                    raise UserError(f"layer {layer} has two groups of experts ({name}); a trace holds one per layer")
                self.experts_of_layer[layer] = int(module.num_experts)
                self._listen(layer, module)
        if not self.experts_of_layer:
            raise UserError("the model has no layer with a fused experts module; is it a mixture of experts?")
        if len(set(self.experts_of_layer.values())) > 1:
            raise UserError(f"layers differ in their number of experts: {sorted(set(self.experts_of_layer.values()))}")

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted(self.experts_of_layer))

    def take(self) -> np.ndarray:
        if missing := sorted(set(self.layers) - self._ids.keys()):
            raise UserError(f"layers {missing[:4]} were not called in this pass; the model may skip layers")
        ids_TLK = np.stack([self._ids[layer] for layer in self.layers], axis=1)
        self._ids.clear()
        return ids_TLK

    def _listen(self, layer: int, module: torch.nn.Module) -> None:
        def before_experts(_, args, kwargs):
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            ids = next(x for x in tensors if not x.is_floating_point())
            self._ids[layer] = ids.reshape(-1, ids.shape[-1]).cpu().numpy()

        def after_scores(router, _, output):  # a router that only weighs its experts: the others have weight 0
            scores_TE = output[0].reshape(-1, router.num_experts)
            self._ids[layer] = scores_TE.topk(router.top_k).indices.cpu().numpy()

        if _is_experts(module):
            module.register_forward_pre_hook(before_experts, with_kwargs=True)
        else:
            module.register_forward_hook(after_scores)


def _is_experts(module: torch.nn.Module) -> bool:
    return type(module).__name__.endswith("Experts")


def _chooses(name: str, module: torch.nn.Module) -> bool:
    """The module whose call shows the choice: the fused experts, or Llama 4's router (its experts get no ids)."""
    if not hasattr(module, "num_experts"):
        return False
    if type(module).__name__ == "Llama4Router":
        return True
    return name.endswith(".experts") and _is_experts(module) and not type(module).__name__.startswith("Llama4")


def sequences(args: argparse.Namespace, tokenizer) -> Iterator[np.ndarray]:
    """Token ids of each sequence, at most ``--tokens`` in all."""
    left = args.tokens
    for ids in _sources(args, tokenizer):
        for start in range(0, len(ids), args.sequence_length):
            piece = ids[start : start + min(args.sequence_length, left)]
            if not len(piece):
                return
            yield piece
            left -= len(piece)


def _sources(args: argparse.Namespace, tokenizer) -> Iterator[np.ndarray]:
    if args.like_trace:
        trace = load_trace(args.like_trace)
        if trace.token_ids_T is None:
            raise UserError(f"{args.like_trace} has no token_ids; record from text files")
        starts = trace.sequence_starts()
        yield from (trace.token_ids_T[a:b] for a, b in zip(starts[:-1], starts[1:]))
        return
    for path in args.text:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {path}: {error}; give UTF-8 text files") from None
        yield np.asarray(tokenizer(text)["input_ids"], np.int64)


def record(args: argparse.Namespace) -> Trace:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = None if args.like_trace else AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).to(args.device).eval()
    recorder = Recorder(model)
    blocks, tokens = [], []
    with torch.inference_mode():
        for ids in sequences(args, tokenizer):
            model(torch.as_tensor(ids.astype(np.int64), device=args.device)[None], use_cache=False)
            blocks.append(recorder.take())
            tokens.append(ids)
            print(f"\r{sum(map(len, tokens))} tokens", end="", file=sys.stderr)
    print(file=sys.stderr)
    if not blocks:
        raise UserError("the inputs hold no tokens; give longer texts")
    num_experts = recorder.experts_of_layer[recorder.layers[0]]
    shape = MoEShape(recorder.layers, num_experts, blocks[0].shape[2], args.name or Path(args.model).resolve().name)
    hashed = Path(args.model) / "tokenizer.json"
    return Trace(
        shape,
        np.concatenate(blocks).astype(id_dtype(num_experts)),
        np.array([len(ids) for ids in tokens], np.int32),
        token_ids_T=np.concatenate(tokens).astype(np.uint32),
        tokenizer_sha256=hashlib.sha256(hashed.read_bytes()).hexdigest() if hashed.is_file() else "",
        source=str(args.output),
    )


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub name of a transformers MoE model")
    parser.add_argument("text", nargs="*", help="UTF-8 text files of one domain")
    parser.add_argument("--like-trace", help="record the token ids of this trace instead of text")
    parser.add_argument("-o", "--output", required=True, help="the trace to write (.npz)")
    parser.add_argument("--tokens", type=int, default=16384, help="stop after this many tokens (default 16384)")
    parser.add_argument("--sequence-length", type=int, default=512, help="tokens of a sequence (default 512)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--name", help="model name to write (default: the folder's)")
    args = parser.parse_args(argv)
    if bool(args.text) == bool(args.like_trace):
        parser.error("give text files, or --like-trace FILE")
    if args.tokens < 1 or args.sequence_length < 1:
        parser.error("--tokens and --sequence-length must be at least 1")
    return args


def main() -> int:
    args = parse(sys.argv[1:])
    try:
        trace = record(args)
        require_sound(trace, lambda message: print(f"note: {message}", file=sys.stderr))
        trace.save(args.output)
    except (UserError, OSError) as error:
        print(f"record_transformers_trace: {error}", file=sys.stderr)
        return 2
    sequences_layers = f"{len(trace.seq_lens)} sequences, {trace.shape.num_layers} layers"
    print(f"{args.output}: {trace.num_tokens} tokens in {sequences_layers}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
