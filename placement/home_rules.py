"""Home ranks of a trace's requests: read from a file, or chosen as the runtime would choose them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from placement.errors import BROKEN_ARRAY, UserError
from placement.homes import Affinity, assign_homes, home_slack, score_prompt, score_routing
from placement.plan import Plan
from placement.trace import Trace


def choose_homes(plan: Plan, affinity: Affinity, trace: Trace, how: tuple[str, int]) -> np.ndarray:
    """int64 ``[sequences]`` from the first tokens of each: their ids (``prompt``) or their routing (``probe``).

    ``how``: (``prompt`` or ``probe``, number of tokens). All requests are assigned together; home loads stay near the
    mean.
    """
    rule, first = how
    spans = [slice(a, min(b, a + first)) for a, b in zip(trace.sequence_starts(), trace.sequence_starts()[1:])]
    if rule == "probe":
        scores = [score_routing(trace.expert_ids_TLK[span], affinity.expert_rank_LEW) for span in spans]
    else:
        if trace.token_ids_T is None or not len(affinity.token_rank_VW):
            raise UserError(f"{trace.source} or the affinity file has no token ids; use probe:{first}")
        hashes = {affinity.tokenizer_sha256, trace.tokenizer_sha256} - {""}
        if len(hashes) > 1:
            raise UserError(f"{trace.source} and the affinity file are of different tokenizers; record the trace again")
        scores = [score_prompt(trace.token_ids_T[span], affinity.token_rank_VW) for span in spans]
    return assign_homes(np.array(scores), trace.seq_lens, home_slack(plan))


def read_homes(path: str | Path, sequences: int) -> np.ndarray:
    """int64 ``[sequences]`` from ``.json`` (a list, or ``homes`` in an object), ``.npy`` or ``.npz`` with ``homes``."""
    file = Path(path)
    try:
        if file.suffix in (".npy", ".npz"):
            loaded = np.load(file, allow_pickle=False)
            homes = loaded if isinstance(loaded, np.ndarray) else loaded["homes"]
        else:
            raw = json.loads(file.read_text(encoding="utf-8"))
            homes = np.asarray(raw["homes"] if isinstance(raw, dict) else raw)
    except BROKEN_ARRAY as error:
        raise UserError(f"cannot read homes {path}: {error}; give a list with one rank per sequence") from None
    if homes.shape != (sequences,) or not np.issubdtype(homes.dtype, np.integer):
        raise UserError(f"{path} holds {homes.dtype} {homes.shape}; give one rank for each of {sequences} sequences")
    return homes.astype(np.int64)
