"""Tokens of the embedded model's corpus: the tokenizer, the streams, the order of batches, and plain entropies."""

from __future__ import annotations

import hashlib
import lzma
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"  # id 0, between documents
SHARES = {"english": 0.20, "german": 0.15, "french": 0.13, "python": 0.20, "c": 0.14, "go": 0.18}  # of every batch
SAMPLE_CHARS = 4_000_000  # of each domain, for the tokenizer


def read_documents(corpus: Path, domain: str, part: str) -> list[str]:
    """Documents of a corpus written by demo_corpus.py; ``part`` is ``train`` or ``heldout``."""
    return lzma.decompress((corpus / f"{domain}.{part}.txt.xz").read_bytes()).decode().split("\0")


def train_tokenizer(corpus: Path, vocab: int) -> Tokenizer:
    """Byte-level BPE on equally much text of every domain."""
    texts = []
    for domain in SHARES:
        left = SAMPLE_CHARS
        for text in read_documents(corpus, domain, "train"):
            texts.append(text[:left])
            left -= len(texts[-1])
            if not left:
                break
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocab, special_tokens=[END], initial_alphabet=sorted(alphabet))
    )
    return tokenizer


def token_stream(corpus: Path, domain: str, part: str, tokenizer: Tokenizer, cache: Path) -> np.ndarray:
    """uint16 tokens of a domain: each document after an end token. Kept in ``cache``, named by what it depends on."""
    packed = (corpus / f"{domain}.{part}.txt.xz").read_bytes()
    key = hashlib.sha256(packed + tokenizer.to_str().encode()).hexdigest()[:16]
    kept = cache / f"{domain}.{part}.{key}.npy"
    if not kept.is_file():
        encoded = tokenizer.encode_batch_fast(read_documents(corpus, domain, part), add_special_tokens=False)
        cache.mkdir(parents=True, exist_ok=True)
        np.save(kept, np.concatenate([np.array([0, *document.ids], np.uint16) for document in encoded]))
    return np.load(kept)


@dataclass(frozen=True)
class BatchOrder:
    """Which windows of the streams a step trains on: a function of (seed, step) alone, so that a run can resume.

    Every step takes the same number of windows of each domain. A domain's windows are permuted anew each epoch, and
    their common offset moves, so that no two epochs cut the text alike.
    """

    lengths: tuple[int, ...]  # tokens of each domain's stream, in the order of SHARES
    batch: int
    window: int
    seed: int

    def counts(self) -> list[int]:
        """Windows of each domain in a step; sums to ``batch``."""
        edges = np.round(np.cumsum([0, *SHARES.values()]) * self.batch).astype(int)
        return np.diff(edges).tolist()

    def starts(self, step: int) -> np.ndarray:
        """int64 ``[batch]``: first tokens of the step's windows in the concatenation of the streams."""
        starts, base = [], 0
        for domain, (length, count) in enumerate(zip(self.lengths, self.counts())):
            windows = (length - self.window) // self.window
            assert windows > 0, f"domain {domain} has {length} tokens, fewer than two windows of {self.window}"
            for n in range(step * count, (step + 1) * count):
                epoch, place = divmod(n, windows)
                order, offset = epoch_order(self.seed, domain, epoch, windows, self.window)
                starts.append(base + offset + order[place] * self.window)
            base += length
        return np.array(starts, np.int64)


@lru_cache(maxsize=32)
def epoch_order(seed: int, domain: int, epoch: int, windows: int, window: int) -> tuple[np.ndarray, int]:
    """(order of a domain's windows, their common offset in tokens)."""
    random = np.random.default_rng([seed, domain, epoch])
    return random.permutation(windows), int(random.integers(window))


def entropies(train: np.ndarray, heldout: np.ndarray, vocab: int) -> dict[str, float]:
    """What counting alone predicts of ``heldout``, in nats per token.

    ``unigram`` and ``bigram``: entropies of the held-out text's own counts, ``H(next)`` and ``H(next | previous)``, the
    least that any table of single tokens or of pairs could reach on it. ``bigram_trained``: cross-entropy of a table of
    pairs counted on the training text, with Witten-Bell smoothing towards the single tokens.
    """
    train_VV, held_VV = pair_counts(train, vocab), pair_counts(heldout, vocab)
    total = held_VV.sum()
    next_V, previous_V = held_VV.sum(0), held_VV.sum(1)
    single_V = (train_VV.sum(0) + 1) / (train_VV.sum() + vocab)
    rows, columns = np.nonzero(held_VV)
    count = held_VV[rows, columns]
    kinds_V = (train_VV > 0).sum(1).clip(1)
    likely = (train_VV[rows, columns] + kinds_V[rows] * single_V[columns]) / (train_VV.sum(1) + kinds_V)[rows]
    return {
        "unigram": float(-(plogp(next_V / total)).sum()),
        "bigram": float(-(count * np.log(count / previous_V[rows])).sum() / total),
        "bigram_trained": float(-(count * np.log(likely)).sum() / total),
    }


def pair_counts(tokens: np.ndarray, vocab: int) -> np.ndarray:
    """int64 ``[V, V]``: how often token j follows token i."""
    pairs = tokens[:-1].astype(np.int64) * vocab + tokens[1:]
    return np.bincount(pairs, minlength=vocab * vocab).reshape(vocab, vocab)


def plogp(p: np.ndarray) -> np.ndarray:
    return np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0)
