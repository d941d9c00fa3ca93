"""From what the ranks recorded to one trace file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from launch.prompts import cannot_write
from placement.errors import UserError
from placement.plan import MoEShape
from placement.trace import Trace, id_dtype

RECORD_TOKENS = 1 << 18  # default limit over all ranks: 100 MB with 48 layers and 8 choices


@dataclass(frozen=True)
class Recorded:
    """A trace of one run, with the home rank of each sequence; ``full``: the limit ended it."""

    trace: Trace
    full: bool

    def describe(self, path: str) -> str:
        limit = "; the limit was reached: later tokens are not in it (--record-tokens, record_tokens raise it)"
        sequences = f"{len(self.trace.seq_lens)} sequences"
        return f"trace {path}: {self.trace.num_tokens} tokens of {sequences}{limit if self.full else ''}"


def limit_per_rank(tokens: int, ranks: int) -> int:
    """Each rank's share of a limit over all ranks."""
    if type(tokens) is not int or tokens < 1:
        raise UserError(f"record_tokens is {tokens!r}; it must be a whole number of at least 1")
    return -(-tokens // ranks)


def merge(messages: list[dict], shape: MoEShape, lengths: dict[int, int], tokenizer: str) -> Recorded | None:
    """One trace of what all ranks sent, sequences in order of request id; ``None`` if no token was recorded.

    Args:
        messages: the ranks' ``trace`` messages (see ``epmoe/engine/worker.py``).
        lengths: tokens of each request that its result accounts for; what the ranks ran beyond them (after a stop
            string, which only the front sees) is cut off.
        tokenizer: hash of the tokenizer that the token ids are of.
    """
    dtype, cell = id_dtype(shape.num_experts), (shape.num_layers, shape.top_k)
    found = {}
    for message in messages:
        for number, token_bytes, id_bytes in message["sequences"]:
            assert number not in found, f"request {number} was recorded on ranks {found[number][0]}, {message['rank']}"
            ids_TLK = np.frombuffer(id_bytes, dtype).reshape(-1, *cell)[: lengths[number]]
            found[number] = (message["rank"], np.frombuffer(token_bytes, np.uint32)[: lengths[number]], ids_TLK)
    if not found:
        return None
    homes, tokens, ids = zip(*(found[number] for number in sorted(found)))
    trace = Trace(
        shape,
        np.concatenate(ids),
        np.array([len(each) for each in ids], np.int32),
        token_ids_T=np.concatenate(tokens),
        homes=np.array(homes, np.int32),
        tokenizer_sha256=tokenizer,
        source="the recorded trace",
    )
    return Recorded(trace, any(message["full"] for message in messages))


def save(recorded: Recorded | None, path: str | Path) -> str:
    """Write the trace; what to tell the user. ``UserError`` if it cannot be written."""
    if recorded is None:
        return f"no token was run: {path} is not written"
    try:
        recorded.trace.save(path)
    except OSError as error:
        raise UserError(cannot_write(path, error)) from None
    return recorded.describe(str(path))
