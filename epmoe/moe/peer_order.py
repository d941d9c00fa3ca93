"""In which order a rank visits its peers: rounds in which every rank sends to one and receives from one.

Without a forecast the rounds are rotations.  With one, each round is a heavy matching of what is left of the expected
traffic, so that large blocks travel beside large ones and no round waits long for a single pair.
"""

from __future__ import annotations

import numpy as np

from placement.plan import Plan


def expected_rows(plan: Plan) -> np.ndarray:
    """float64 ``[W, W]``: rows that a token of each home sends to each rank in a layer, if every set of K experts is as
    likely; the mean over the layers."""
    experts, serve_WLE = plan.shape.num_experts, plan.serve_rank_WLE
    served_WLW = np.stack([(serve_WLE == rank).sum(2) for rank in range(plan.ranks)], 2)
    missed_WLW = np.ones(served_WLW.shape)
    for k in range(plan.shape.top_k):
        missed_WLW *= np.maximum(experts - served_WLW - k, 0) / (experts - k)
    return (1 - missed_WLW).mean(1)


def rotated_order(world: int) -> np.ndarray:
    """int64 ``[W, W]``: row r holds rank r's peers from its right neighbour on, itself last."""
    rank_W = np.arange(world)
    return (rank_W[:, None] + 1 + rank_W) % world


def matched_order(rows_WW: np.ndarray) -> np.ndarray:
    """Peers by rounds of a greedy decomposition of the expected traffic into matchings.

    Args:
        rows_WW: expected rows from each rank (first index) to each; the diagonal does not travel and is ignored.

    Returns:
        int64 ``[W, W]``: row r holds rank r's peer in each round, itself last; every column is a permutation.

    A round takes the heaviest pairs first, and moves earlier choices aside along augmenting paths where that leaves no
    partner for a rank: the pairs that are left always form a regular bipartite graph, which has a perfect matching.
    Where rotations happen to take no longer, they are the answer.
    """
    world = len(rows_WW)
    left_WW = ~np.eye(world, dtype=bool)
    order_WW = np.empty((world, world), dtype=np.int64)
    order_WW[:, -1] = np.arange(world)
    for n in range(world - 1):
        order_WW[:, n] = _heavy_matching(np.where(left_WW, rows_WW, -1.0), left_WW)
        left_WW[np.arange(world), order_WW[:, n]] = False
    rotated_WW = rotated_order(world)
    better = round_rows(rows_WW, order_WW).sum() < round_rows(rows_WW, rotated_WW).sum()
    return order_WW if better else rotated_WW


def round_rows(rows_WW: np.ndarray, order_WW: np.ndarray) -> np.ndarray:
    """The heaviest pair of each round: what the round takes, in rows; without the last, a rank to itself."""
    return np.take_along_axis(np.asarray(rows_WW), order_WW[:, :-1], 1).max(0)


def _heavy_matching(weight_WW: np.ndarray, allowed_WW: np.ndarray) -> np.ndarray:
    """The receiver of each sender: greedy by weight, then completed."""
    world = len(weight_WW)
    receiver_W, sender_W = np.full(world, -1), np.full(world, -1)
    for pair in np.argsort(-weight_WW, axis=None, kind="stable"):
        sender, receiver = divmod(int(pair), world)
        if allowed_WW[sender, receiver] and receiver_W[sender] < 0 and sender_W[receiver] < 0:
            receiver_W[sender], sender_W[receiver] = receiver, sender

    def place(sender: int, tried: set[int]) -> bool:
        for receiver in np.argsort(-weight_WW[sender], kind="stable"):
            if allowed_WW[sender, receiver] and receiver not in tried:
                tried.add(receiver)
                if sender_W[receiver] < 0 or place(sender_W[receiver], tried):
                    receiver_W[sender], sender_W[receiver] = receiver, sender
                    return True
        return False

    for sender in np.flatnonzero(receiver_W < 0):
        assert place(int(sender), set()), "the pairs that are left have no perfect matching"
    return receiver_W
