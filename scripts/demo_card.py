"""The embedded model's card, written from the run's own figures."""

from __future__ import annotations

from math import prod

TITLES = {
    "english": "English manuals",
    "german": "German manuals",
    "french": "French manuals",
    "python": "Python source",
    "c": "C source",
    "go": "Go source",
}


def card(metrics: dict, samples: dict[str, str], manifest: dict) -> str:
    """Markdown: what it is, losses, data and licences, cost, samples, limits."""
    recipe, cost = metrics["recipe"], metrics["cost"]
    shape = recipe["shape"]
    return f"""# {metrics["name"]}: the model that ships with epmoe

A mixture-of-experts language model small enough to live in the package, for the demo and the tests. Hugging Face
Qwen3-MoE format, bfloat16: {shape["layers"]} layers, {shape["experts"]} experts of width {shape["expert_hidden"]}, \
top-{shape["top_k"]}, hidden size {shape["hidden"]},
{shape["heads"]} heads and {shape["kv_heads"]} of keys and values, tied embeddings, {parameters(shape) / 1e6:.2f} \
million parameters, a byte-level BPE tokenizer of
{shape["vocab"]} tokens, contexts of up to {shape["context"]} tokens.

It has learned the look of manuals in three languages and of code in three, nothing more: it knows no facts, follows no
instructions, and what it writes is not to be relied on.

## Held-out loss

Nats per token on documents that were not trained on ({heldout(metrics)} tokens, split by document, without near
copies), measured with transformers on the shipped bfloat16 weights over windows of {shape["context"]} tokens.
*Unigram* and *bigram* are entropies of the held-out text's own counts: the least that any table of single tokens, or of
pairs, could reach on that very text. *Bigram, trained* is a table of pairs counted on the training text, with
Witten-Bell smoothing.

| domain | loss | bigram | bigram, trained | unigram | bits per byte | held-out tokens | training tokens |
|---|---|---|---|---|---|---|---|
{rows(metrics["domains"])}

Float32 logits agree with transformers' to {metrics["max_logit_difference"]:.0e} of the largest.

## Training

`scripts/train_demo_model.py` on the corpus of `scripts/demo_corpus.py`: {recipe["steps"]} steps of {recipe["batch"]}
sequences of {shape["context"]} tokens ({cost["tokens"] / 1e6:.0f} million tokens), {cost["seconds"]:.0f} s on one
{cost["device"]}, torch {cost["torch"]}. Muon for the matrices in the layers, AdamW for the rest, learning rate
{recipe["lr"]} with linear warm-up and decay, bfloat16 autocast, seed {recipe["seed"]}. Routing is the project's own in
its training form (`epmoe/moe/router_training.py`), with the load-balancing loss of Switch Transformers and GShard at
{recipe["balance"]}, noisy gating {"on" if shape["noise"] else "off"}.

## Data and licences

Text of Debian packages, three prose and three code domains. Documents whose lines are mostly those of an earlier one
are left out; so are licence headers. The table names each text's main licence; `/usr/share/doc/PACKAGE/copyright` has
the rest.

| package | version | licence of the text |
|---|---|---|
{packages(manifest)}

The weights are offered under the project's licence as far as the project has rights in them. The model can repeat
passages of the texts above: whoever passes on what it writes should bear their licences in mind.

## Routing traces

`trace_DOMAIN.npz` (format `epmoe-trace/1`): the experts that held-out text of each domain chose, with its tokens.

## Samples

Temperature 0.8, from the likeliest 90 %; the first lines are the prompt.

{samples_text(samples)}
"""


def parameters(shape: dict) -> int:
    attention = 2 * shape["hidden"] * (shape["heads"] + shape["kv_heads"]) * shape["head_dim"]
    experts = prod([3, shape["experts"], shape["expert_hidden"], shape["hidden"]])
    norms = 2 * shape["hidden"] + 2 * shape["head_dim"]
    layer = attention + experts + shape["experts"] * shape["hidden"] + norms
    return shape["layers"] * layer + (shape["vocab"] + 1) * shape["hidden"]


def heldout(metrics: dict) -> str:
    return f"{sum(found['heldout_tokens'] for found in metrics['domains'].values()):,}"


def rows(domains: dict[str, dict]) -> str:
    return "\n".join(
        f"| {TITLES[domain]} | **{d['loss']:.3f}** | {d['bigram']:.3f} | {d['bigram_trained']:.3f} | {d['unigram']:.3f}"
        f" | {d['bits_per_byte']:.3f} | {d['heldout_tokens']:,} | {d['train_tokens']:,} |"
        for domain, d in domains.items()
    )


def packages(manifest: dict) -> str:
    found = sorted(manifest["packages"].items())
    return "\n".join(f"| {name} | {facts['version']} | {facts['license']} |" for name, facts in found)


def samples_text(samples: dict[str, str]) -> str:
    return "\n\n".join(f"{TITLES[domain]}:\n\n```\n{text.strip()}\n```" for domain, text in samples.items())
