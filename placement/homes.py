"""Home affinity: which home rank a request should have under a plan, from its prompt or from a probe of its routing.

A request's score for a home is minus the remote rows per token and layer that it would cause there.  Two linear models,
fitted on training requests, predict it for a new one:

    from prompt tokens:   score[h] = mean over prompt tokens of token_rank[token, h]
    from routed tokens:   score[h] = mean over probed tokens of the sum over layers and choices of expert_rank[l, e, h]

Both are ridge regressions from counts (of token ids, of experts) to the scores of whole requests: a probe's own rows
say less of the rest of a request than what similar requests did.  Their tables are the plan's affinity file
(``.npz``: ``token_rank`` float16 ``[vocabulary, W]``, ``tokenizer_sha256``, and beside them ``expert_rank`` float16
``[L, E, W]``).  The functions here are pure; the runtime calls :func:`score_prompt`, :func:`score_routing` and
:func:`assign_homes`.
"""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from placement.errors import BROKEN_ARRAY, UserError
from placement.plan import Plan
from placement.textfiles import whole_file
from placement.trace import Trace

HOME_SLACK = 1.09  # most tokens of a home over the mean
COPY_SLACK = 1.03  # where experts have copies: there uneven homes are uneven load, and even ones cost few rows
RIDGE = 30.0  # in units of the mean squared distance of a training request from the mean
_CHUNK_CELLS = 1 << 21
_MOST_FITTED = 4096  # requests that the tables are fitted on: they are smooth, and the work goes with the cube


@dataclass(frozen=True, eq=False)
class Affinity:
    """The affinity file: float16 ``token_rank_VW`` (no rows where no token ids were recorded), ``expert_rank_LEW``."""

    token_rank_VW: np.ndarray
    expert_rank_LEW: np.ndarray
    tokenizer_sha256: str = ""

    def require_fits(self, plan: Plan) -> None:
        """Raise ``UserError`` where the tables are of another model or machine than the plan."""
        want = (plan.shape.num_layers, plan.shape.num_experts, plan.ranks)
        if self.expert_rank_LEW.shape != want or self.token_rank_VW.shape[1] != plan.ranks:
            found = f"{list(self.expert_rank_LEW.shape)} and {list(self.token_rank_VW.shape)}"
            raise UserError(
                f"the affinity file {plan.affinity} has tables {found}, the plan needs {list(want)} and"
                f" [vocabulary, {plan.ranks}]; use the file that was written with the plan"
            )

    def save(self, path: str | Path) -> None:
        with whole_file(path) as file:
            np.savez_compressed(
                file,
                token_rank=self.token_rank_VW,
                expert_rank=self.expert_rank_LEW,
                tokenizer_sha256=np.array(self.tokenizer_sha256),
            )

    @staticmethod
    def load(path: str | Path) -> Affinity:
        if os.path.isfile(path) and not zipfile.is_zipfile(path):
            raise UserError(f"affinity file {path} is no .npz archive; write it with the plan it belongs to")
        try:
            with np.load(path, allow_pickle=False) as raw:
                found = Affinity(raw["token_rank"], raw["expert_rank"], str(raw["tokenizer_sha256"]))
        except BROKEN_ARRAY as error:
            raise UserError(
                f"cannot read affinity file {path}: {error}; write it with the plan it belongs to"
            ) from None
        if found.token_rank_VW.ndim != 2 or found.expert_rank_LEW.ndim != 3:
            shapes = found.token_rank_VW.shape, found.expert_rank_LEW.shape
            raise UserError(f"affinity file {path}: shapes {shapes}, expected [vocabulary, W] and [L, E, W]")
        if not all(np.isfinite(table).all() for table in (found.token_rank_VW, found.expert_rank_LEW)):
            raise UserError(f"affinity file {path} holds scores that are no finite numbers; solve the plan again")
        return found


def score_prompt(prompt_token_ids: np.ndarray, token_rank_VW: np.ndarray) -> np.ndarray:
    """float32 ``[W]``: predicted score of each home from prompt token ids alone; ids beyond the table are ignored.

    >>> score_prompt(np.array([0, 1, 1]), np.array([[3.0, 0.0], [0.0, 3.0]]))
    array([1., 2.], dtype=float32)
    """
    ids = np.asarray(prompt_token_ids, np.int64).ravel()
    known = ids[(ids >= 0) & (ids < len(token_rank_VW))]
    return token_rank_VW[known].astype(np.float32).sum(0) / np.float32(max(1, len(known)))


def score_routing(expert_ids_TLK: np.ndarray, expert_rank_LEW: np.ndarray) -> np.ndarray:
    """float32 ``[W]``: predicted score of each home from the routing of a request's first tokens."""
    T, L, _ = expert_ids_TLK.shape
    table = expert_rank_LEW[np.arange(L)[:, None], expert_ids_TLK.astype(np.intp)]
    return table.astype(np.float32).sum((0, 1, 2)) / np.float32(max(1, T))


def home_slack(plan: Plan) -> float:
    """The slack of :func:`assign_homes` that suits a plan."""
    return COPY_SLACK if (plan.copies_LE > 1).any() else HOME_SLACK


def assign_homes(
    score_RW: np.ndarray, tokens_R: np.ndarray, slack: float = HOME_SLACK, improve: bool = True
) -> np.ndarray:
    """int64 ``[R]``: homes of a batch of requests, most score per token, no home above ``slack`` times the mean tokens.

    (Or above the longest request, where that is more.) Requests with most to lose choose first; then, with ``improve``,
    the best move or exchange until none helps.
    """
    R, W = score_RW.shape
    tokens_R = np.asarray(tokens_R, np.float64)
    value_RW = score_RW.astype(np.float64) * tokens_R[:, None]
    cap = max(slack * tokens_R.sum() / W, tokens_R.max(initial=0.0))
    homes, load_W = np.zeros(R, np.int64), np.zeros(W)
    for request in np.argsort(-np.ptp(value_RW, axis=1) if R else [], kind="stable"):
        fits_W = load_W + tokens_R[request] <= cap
        choice_W = np.where(fits_W, value_RW[request], -np.inf) if fits_W.any() else -load_W
        homes[request] = choice_W.argmax()
        load_W[homes[request]] += tokens_R[request]
    tries = min(20 * R, _PAIRS // max(1, min(R, _MANY)) ** 2) if improve else 0
    for _ in range(tries):
        if not _improve_once(homes, load_W, value_RW, tokens_R, cap):
            break
    return homes


_MANY = 2048  # requests whose exchanges are looked at together
_PAIRS = 400_000_000  # pairs of requests looked at before a batch is taken as it is


def _improve_once(
    homes: np.ndarray, load_W: np.ndarray, value_RW: np.ndarray, tokens_R: np.ndarray, cap: float
) -> bool:
    """Make the best single move or exchange of two requests, in place; whether there was one."""
    R, W = value_RW.shape
    gain_RW = value_RW - value_RW[np.arange(R), homes][:, None]
    moved_RW = np.where(load_W + tokens_R[:, None] <= cap, gain_RW, -np.inf)
    some = np.arange(R) if R <= _MANY else np.argsort(-gain_RW.max(1), kind="stable")[:_MANY]
    there = gain_RW[some][:, homes[some]]
    after = load_W[homes[some]][:, None] - tokens_R[some][:, None] + tokens_R[some]
    over = after > np.maximum(cap, load_W[homes[some]])[:, None]
    swapped = np.where(over | over.T, -np.inf, there + there.T)
    move, swap = int(moved_RW.argmax()), int(swapped.argmax())
    if max(moved_RW.flat[move], swapped.flat[swap]) <= 1e-9 * max(1.0, np.abs(value_RW).max()):
        return False
    if moved_RW.flat[move] >= swapped.flat[swap]:
        changes = [(move // W, move % W)]
    else:
        a, b = some[swap // len(some)], some[swap % len(some)]
        changes = [(a, homes[b]), (b, homes[a])]
    for request, rank in changes:
        load_W[homes[request]] -= tokens_R[request]
        load_W[rank] += tokens_R[request]
        homes[request] = rank
    return True


def remote_rows_RW(plan: Plan, trace: Trace) -> np.ndarray:
    """float64 ``[R, W]``: remote rows per token and layer of each request, for each home it might have."""
    T, (L, K), W = trace.num_tokens, trace.expert_ids_TLK.shape[1:], plan.ranks
    rows_TW = np.zeros((T, W), np.float32)
    replicated = bool((plan.copies_LE > 1).any())
    layer_L = np.arange(L)[:, None]
    step = max(1, _CHUNK_CELLS // (L * max(K, W)))
    for start in range(0, T, step):
        ids_TLK = trace.expert_ids_TLK[start : start + step].astype(np.intp)
        n = len(ids_TLK)
        cell_TL1 = (np.arange(n)[:, None] * L + np.arange(L))[..., None] * W
        for home in range(W if replicated else 1):
            rank_TLK = plan.serve_rank_WLE[home][layer_L, ids_TLK]
            reached = np.zeros(n * L * W, bool)
            reached[(cell_TL1 + rank_TLK).ravel()] = True
            reached_TLW = reached.reshape(n, L, W)
            here_TW = reached_TLW.sum(1, dtype=np.float32)
            if replicated:
                rows_TW[start : start + n, home] = here_TW.sum(1) - here_TW[:, home]
            else:
                rows_TW[start : start + n] = here_TW.sum(1, keepdims=True) - here_TW
    return per_request(rows_TW, trace) / L


def per_request(value_TX: np.ndarray, trace: Trace, first: int | None = None) -> np.ndarray:
    """float64 ``[R, X]``: mean of a per-token value over each request, or over its first tokens."""
    starts = trace.sequence_starts()
    ends = starts[1:] if first is None else np.minimum(starts[1:], starts[:-1] + first)
    total = np.concatenate([np.zeros((1, value_TX.shape[1])), np.cumsum(value_TX, axis=0, dtype=np.float64)])
    return (total[ends] - total[starts[:-1]]) / np.maximum(1, ends - starts[:-1])[:, None]


def fit_affinity(plan: Plan, trace: Trace, probe: int = 32) -> Affinity:
    """The tables for a plan, from training requests; ``probe``: tokens that are seen before a home is chosen."""
    if len(trace.seq_lens) > _MOST_FITTED:
        some = np.random.default_rng(0).choice(len(trace.seq_lens), _MOST_FITTED, replace=False)
        trace = trace.take_sequences(np.sort(some))
    score_RW = -remote_rows_RW(plan, trace)
    weight_R = trace.seq_lens.astype(np.float64)
    L, E = trace.shape.num_layers, trace.shape.num_experts
    heads = [slice(s, min(e, s + probe)) for s, e in zip(trace.sequence_starts(), trace.sequence_starts()[1:])]
    routed = np.zeros((len(heads), L * E), np.float32)
    for row, head in zip(routed, heads):
        cell = trace.expert_ids_TLK[head].astype(np.intp) + np.arange(L)[:, None] * E
        row += np.bincount(cell.ravel(), minlength=L * E) / max(1, head.stop - head.start)
    # the mean score and the mean of the features only move all requests alike, but homes must stay comparable:
    # the constant goes into the table, spread over the L * K choices of a token
    slope, constant = _ridge(routed, score_RW, weight_R)
    expert_rank = slope.reshape(L, E, -1) + constant / (L * trace.shape.top_k)
    tokens = np.zeros((0, plan.ranks), np.float16)
    if trace.token_ids_T is not None and trace.num_tokens:
        tokens = _token_table(trace, heads, score_RW, weight_R).astype(np.float16)
    return Affinity(tokens, expert_rank.astype(np.float16), trace.tokenizer_sha256)


def _token_table(trace: Trace, heads: list[slice], score_RW: np.ndarray, weight_R: np.ndarray) -> np.ndarray:
    vocabulary = int(trace.token_ids_T.max()) + 1
    counts = np.zeros((len(heads), vocabulary), np.float32)
    for row, head in zip(counts, heads):
        row += np.bincount(trace.token_ids_T[head], minlength=vocabulary) / max(1, head.stop - head.start)
    rare_V = 1 / np.sqrt(counts.mean(0) + 0.1 / vocabulary)  # a common token says little of a request
    slope, constant = _ridge(counts * rare_V, score_RW, weight_R)
    return slope * rare_V[:, None] + constant


def _ridge(feature_RX: np.ndarray, score_RW: np.ndarray, weight_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(slope ``[X, W]``, constant ``[W]``): penalised least squares; in the dual where features are more."""
    R, X = feature_RX.shape
    if not R:
        return np.zeros((X, score_RW.shape[1])), np.zeros(score_RW.shape[1])
    mean_X = feature_RX.mean(0, dtype=np.float64)
    mean_W = np.average(score_RW, axis=0, weights=np.maximum(weight_R, 1e-12))
    centred = feature_RX - mean_X
    kernel = centred.T @ centred if X < R else centred @ centred.T
    penalty = RIDGE * max(np.trace(kernel) / R, 1e-12) / R
    kernel[np.diag_indices(len(kernel))] += penalty
    if X < R:
        slope = np.linalg.solve(kernel, centred.T @ (score_RW - mean_W))
    else:
        slope = centred.T @ np.linalg.solve(kernel, score_RW - mean_W)
    return slope, mean_W - mean_X @ slope
