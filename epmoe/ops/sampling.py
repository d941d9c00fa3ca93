"""From logits to a token, with noise that depends on who asks and never on where in the batch it sits.

Sampling is Gumbel-max: ``argmax(log p + g)`` draws from p when g is Gumbel noise.  The noise of a draw is a hash of
(request seed, sample index, position) and the token id, so that batching, preemption and placement never change it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from epmoe.ops.draw import UNDRAWN, Draws, draw

LARGEST_TOP_K = 1 << 30  # fits an int32, and no vocabulary is larger
Upload = Callable[[Sequence[np.ndarray]], list[torch.Tensor]]
_MASK64 = (1 << 64) - 1
_STEP, _MIX = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


@dataclass(frozen=True)
class SampleRow:
    """One draw: the request's parameters as plain numbers, and what its noise is keyed by.

    ``prompt`` and ``output`` are the token ids that penalties count (empty where none apply).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    key: int = 0


def noise_key(seed: int, sample_index: int, position: int) -> int:
    """64-bit key of a draw (SplitMix64 over the three numbers)."""
    return _splitmix(noise_stem(seed, sample_index) + position)


def noise_stem(seed: int, sample_index: int) -> int:
    """What the keys of all draws of one sample have in common."""
    return _splitmix(_splitmix(seed) + sample_index)


def noise_keys(stem_N: np.ndarray, position_N: np.ndarray) -> np.ndarray:
    """`noise_key` of many draws, uint64 ``[N]``, from their stems (uint64) and positions."""
    key = stem_N + position_N.astype(np.uint64) + np.uint64(_STEP)
    key = (key ^ (key >> np.uint64(30))) * np.uint64(_MIX[0])
    key = (key ^ (key >> np.uint64(27))) * np.uint64(_MIX[1])
    return key ^ (key >> np.uint64(31))


def _splitmix(key: int) -> int:
    key = (key + _STEP) & _MASK64
    key = ((key ^ (key >> 30)) * _MIX[0]) & _MASK64
    key = ((key ^ (key >> 27)) * _MIX[1]) & _MASK64
    return key ^ (key >> 31)


def pack_draws(rows: Sequence[SampleRow], device: torch.device | str, upload: Upload | None = None) -> Draws:
    """The rows' parameters on a device (penalties are not among them)."""
    columns = (
        np.array([row.temperature for row in rows], np.float32),
        np.array([min(row.top_k, LARGEST_TOP_K) for row in rows], np.int32),
        np.array([row.top_p for row in rows], np.float32),
        np.array([row.min_p for row in rows], np.float32),
        np.array([row.key for row in rows], np.uint64).view(np.int64),
    )
    return Draws(*(upload(columns) if upload else [torch.from_numpy(column).to(device) for column in columns]))


def sample(
    logits_NV: torch.Tensor,
    rows: Sequence[SampleRow],
    pending_N: torch.Tensor | None = None,
    upload: Upload | None = None,
) -> torch.Tensor:
    """Draw one token per row, `UNDRAWN` where a logit is not finite: int64 ``[N]`` on the logits' device.

    Args:
        logits_NV: model dtype; computed in float32.
        pending_N: int64, a token of the row's output that the host does not know yet, or -1 (for penalties).
        upload: brings arrays to the logits' device (by default with a wait for it).
    """
    if all(row.temperature == 0 and not _penalised(row) for row in rows):
        return _drawn(logits_NV.float().argmax(-1), logits_NV)
    logits_NV = apply_penalties(logits_NV.float(), rows, pending_N, upload)
    if logits_NV.is_cuda:
        return draw(logits_NV, pack_draws(rows, logits_NV.device, upload))
    drawn = [i for i, row in enumerate(rows) if row.temperature > 0]
    token_N = logits_NV.argmax(-1)
    if drawn:
        asked = [rows[i] for i in drawn]
        temperature = logits_NV.new_tensor([row.temperature for row in asked])
        kept_NV = keep_likely(logits_NV[drawn] / temperature[:, None], asked)
        token_N[drawn] = (kept_NV + gumbel_noise([row.key for row in asked], kept_NV)).argmax(-1)
    return _drawn(token_N, logits_NV)


def _drawn(token_N: torch.Tensor, logits_NV: torch.Tensor) -> torch.Tensor:
    low_N, high_N = logits_NV.aminmax(dim=-1)  # either is NaN where any logit is
    return token_N.where(low_N.isfinite() & high_N.isfinite(), UNDRAWN)


def apply_penalties(
    logits_NV: torch.Tensor,
    rows: Sequence[SampleRow],
    pending_N: torch.Tensor | None = None,
    upload: Upload | None = None,
) -> torch.Tensor:
    """Repetition (Keskar et al. 2019), presence and frequency penalties, float32 ``[N, V]``.

    ``upload``: brings arrays to the logits' device (by default with a wait for it).
    """
    hit = [row for row in rows if _penalised(row)]
    if not hit:
        return logits_NV
    V, device = logits_NV.shape[1], logits_NV.device
    bring = upload or (lambda arrays: [torch.from_numpy(array).to(device) for array in arrays])
    at = [n for n, row in enumerate(rows) if _penalised(row)]
    scales = np.array([(r.repetition_penalty, r.presence_penalty, r.frequency_penalty) for r in hit], np.float32)
    at_J, scale_J3, used, seen = bring([np.array(at), scales, _places(hit, "output", V), _places(hit, "prompt", V)])

    used_JV = torch.zeros((len(hit), V), dtype=torch.int64, device=device)
    used_JV.view(-1).scatter_add_(0, used, torch.ones_like(used))
    if pending_N is not None:
        pending_J1 = pending_N[at_J, None]
        used_JV.scatter_add_(1, pending_J1.clamp(min=0), (pending_J1 >= 0).long())
    seen_JV = used_JV > 0
    repetition_J1, presence_J1, frequency_J1 = scale_J3.split(1, 1)
    logits_JV = logits_NV[at_J]
    shrunk_JV = torch.where(logits_JV > 0, logits_JV / repetition_J1, logits_JV * repetition_J1)
    logits_JV = torch.where(seen_JV.view(-1).index_fill(0, seen, True).view_as(seen_JV), shrunk_JV, logits_JV)
    return logits_NV.index_copy(0, at_J, logits_JV - presence_J1 * seen_JV - frequency_J1 * used_JV)


def _places(rows: Sequence[SampleRow], field: str, vocabulary: int) -> np.ndarray:
    """int64 places of the rows' tokens in a flat table ``[rows, vocabulary]``."""
    lists = [np.asarray(getattr(row, field), np.int64) for row in rows]
    return np.concatenate([tokens + j * vocabulary for j, tokens in enumerate(lists)])


def keep_likely(logits_NV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Top-k, then top-p, then min-p, as minus infinity on what is cut; the likeliest token always stays."""
    for i, row in enumerate(rows):
        if row.top_k == 0 and row.top_p == 1 and row.min_p == 0:
            continue
        ordered_V, order_V = logits_NV[i].sort(descending=True, stable=True)
        cut_V = torch.zeros_like(ordered_V, dtype=torch.bool)
        if 0 < row.top_k < len(cut_V):
            cut_V[row.top_k :] = True
        prob_V = ordered_V.masked_fill(cut_V, -torch.inf).softmax(-1)
        cut_V |= prob_V.cumsum(-1) - prob_V >= row.top_p
        cut_V |= prob_V < row.min_p * prob_V[0]
        cut_V[0] = False
        logits_NV[i] = logits_NV[i].masked_fill(torch.zeros_like(cut_V).index_copy_(0, order_V, cut_V), -torch.inf)
    return logits_NV


def gumbel_noise(keys: Sequence[int], like_NV: torch.Tensor) -> torch.Tensor:
    """float32 Gumbel noise ``[N, V]``: a 32-bit mix (after MurmurHash3's finaliser) of key and token id, two rounds."""
    device, V = like_NV.device, like_NV.shape[1]
    low = torch.tensor([key & 0xFFFFFFFF for key in keys], dtype=torch.int64, device=device)[:, None]
    high = torch.tensor([key >> 32 for key in keys], dtype=torch.int64, device=device)[:, None]
    word = torch.arange(V, dtype=torch.int64, device=device)[None]
    word = _mix32(_mix32((word * 0x9E3779B1 + low) & 0xFFFFFFFF) ^ high)
    uniform = (word.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform)).float()


def _mix32(word: torch.Tensor) -> torch.Tensor:
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return word ^ (word >> 16)


def _penalised(row: SampleRow) -> bool:
    return (row.repetition_penalty, row.presence_penalty, row.frequency_penalty) != (1.0, 0.0, 0.0)
