"""Which experts get the spare slots, where, and which copy serves which home: one layer at a time.

The tokens of one home that use one expert are a *group*; a group is served by one copy (``Plan.serve``).  With
``m[t, g]`` the choices of token t that rank g serves and ``weight[h, g]`` the cost of a token of home h reaching g::

    leave[h, e] = weight[h, at] * tokens of the group with m[t, at] == 1        (at: where the group is served)
    join[h, e, g] = weight[h, g] * tokens of the group with m[t, g] == 0
    gain of a copy of e on g = sum_h max(0, leave[h, e] - join[h, e, g])

so that a copy at the group's own home, where weight is 0, always gains.  Copies are added one by one (a few at once
where there are many ranks), then exchanged for better ones while the exactly recounted cost falls, under the caps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import sparse

_SLACK = 1.02  # a copy may bring its rank this far above the cap; exchanges of slots level it afterwards


@dataclass(frozen=True, eq=False)
class LayerTokens:
    """One layer's tokens, by home.

    Args:
        ids_TK: intp experts; home_T: int64.
        weight_HW: float, cost of a token of home h reaching a rank.
        load_HE: float64 (token, choice) pairs of each group, over all training tokens.
        cap_W: float64, most load of each rank.
        slots_W: int64.
    """

    ids_TK: np.ndarray
    home_T: np.ndarray
    weight_HW: np.ndarray
    load_HE: np.ndarray
    cap_W: np.ndarray
    slots_W: np.ndarray


class Copies:
    """Which ranks hold which experts (``held_EW``), which copy serves each group (``serve_HE``), and what follows."""

    def __init__(self, tokens: LayerTokens, held_EW: np.ndarray, serve_HE: np.ndarray) -> None:
        self.tokens, self.held_EW, self.serve_HE = tokens, held_EW, serve_HE
        T, K = tokens.ids_TK.shape
        H, E = tokens.load_HE.shape
        group_TK = tokens.home_T[:, None] * E + tokens.ids_TK
        column = np.repeat(np.arange(T), K)
        data = np.ones(T * K, np.float32)
        self._group_XT = sparse.csr_array((data, (group_TK.ravel(), column)), shape=(H * E, T))
        self._weight_TW = tokens.weight_HW[tokens.home_T].astype(np.float32)

    def count_TW(self) -> np.ndarray:
        """Choices of each token that each rank serves."""
        T, W = self._weight_TW.shape
        rank_TK = self.serve_HE[self.tokens.home_T[:, None], self.tokens.ids_TK]
        return np.bincount((np.arange(T)[:, None] * W + rank_TK).ravel(), minlength=T * W).reshape(T, W)

    def cost(self) -> float:
        return float(self._weight_TW[self.count_TW() > 0].sum(dtype=np.float64))

    def load_W(self) -> np.ndarray:
        return np.bincount(self.serve_HE.ravel(), self.tokens.load_HE.ravel(), self._weight_TW.shape[1])

    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """(leave ``[H, E]``, join ``[H, E, W]``) of the module's docstring."""
        count_TW = self.count_TW()
        shape = (*self.serve_HE.shape, count_TW.shape[1])
        join = (self._group_XT @ (self._weight_TW * (count_TW == 0))).reshape(shape)
        alone = (self._group_XT @ (self._weight_TW * (count_TW == 1))).reshape(shape)
        return np.take_along_axis(alone, self.serve_HE[..., None], -1)[..., 0], join

    def copy(self) -> Copies:
        other = object.__new__(Copies)
        other.__dict__ |= self.__dict__ | {"held_EW": self.held_EW.copy(), "serve_HE": self.serve_HE.copy()}
        return other


def fill(copies: Copies) -> None:
    """Use every free slot: the copies that gain most, then any (a slot left empty helps nobody)."""
    slots_W = copies.tokens.slots_W
    at_once = max(1, len(slots_W) // 8)
    while (open_W := copies.held_EW.sum(0) < slots_W).any():
        leave_HE, join_HEW = copies.tables()
        gain_EW = np.maximum(leave_HE[..., None] - join_HEW, 0).sum(0)
        gain_EW[copies.held_EW] = -np.inf
        gain_EW[:, ~open_W] = -np.inf
        for _ in range(min(at_once, int(open_W.sum()))):
            expert, rank = np.unravel_index(int(gain_EW.argmax()), gain_EW.shape)
            if gain_EW[expert, rank] == -np.inf:
                break
            add(copies, int(expert), int(rank), leave_HE - join_HEW[..., rank])
            gain_EW[expert] = gain_EW[:, rank] = -np.inf


def add(copies: Copies, expert: int, rank: int, gain_HE: np.ndarray) -> None:
    """Place a copy and let it serve the groups that gain, best first, as far as the rank's cap allows."""
    tokens = copies.tokens
    copies.held_EW[expert, rank] = True
    load = copies.load_W()[rank]
    gain_H = gain_HE[:, expert]
    for home in np.argsort(-gain_H, kind="stable"):
        part = tokens.load_HE[home, expert]
        if gain_H[home] <= 0:
            return
        if load + part <= tokens.cap_W[rank] * _SLACK:
            copies.serve_HE[home, expert] = rank
            load += part


def drop(copies: Copies, expert: int, rank: int, join_HEW: np.ndarray) -> None:
    """Remove a copy that is not the last; its groups go to the copy that they join most cheaply."""
    copies.held_EW[expert, rank] = False
    left_W = copies.held_EW[expert]
    assert left_W.any(), f"expert {expert} would be on no rank"
    for home in np.flatnonzero(copies.serve_HE[:, expert] == rank):
        copies.serve_HE[home, expert] = int(np.where(left_W, join_HEW[home, expert], np.inf).argmin())


def reserve(copies: Copies, rounds: int = 3) -> None:
    """Move groups to copies where they cost less and loads allow, then off ranks above their cap at least cost."""
    tokens = copies.tokens
    for _ in range(rounds):
        leave_HE, join_HEW = copies.tables()
        gain_HEW = np.where(copies.held_EW, leave_HE[..., None] - join_HEW, -np.inf)
        np.put_along_axis(gain_HEW, copies.serve_HE[..., None], -np.inf, -1)
        load_W, moved = copies.load_W(), set()
        excess_W = np.maximum(load_W - tokens.cap_W, 0)
        relief_HE = excess_W[copies.serve_HE] > 0
        order = np.argsort(-(gain_HEW + np.where(relief_HE, 1e-3, 0)[..., None]).ravel(), kind="stable")
        before = copies.serve_HE.copy()
        for flat in order[: int((gain_HEW > -np.inf).sum())]:
            home, expert, rank = np.unravel_index(flat, gain_HEW.shape)
            at, part = copies.serve_HE[home, expert], tokens.load_HE[home, expert]
            helps = gain_HEW[home, expert, rank] > 0 or (load_W[at] > tokens.cap_W[at] and part > 0)
            if not helps or expert in moved or load_W[rank] + part > tokens.cap_W[rank]:
                continue
            copies.serve_HE[home, expert] = rank
            load_W[at] -= part
            load_W[rank] += part
            moved.add(expert)  # other groups of the expert share tokens' neighbours: recount first
        if (before == copies.serve_HE).all():
            return


def exchange(copies: Copies, tries: int) -> Copies:
    """Replace copies by better ones while the recounted cost falls; at most ``tries`` recounts."""
    best = copies.cost()
    while tries > 0:
        leave_HE, join_HEW = copies.tables()
        gain_EW = np.where(copies.held_EW, -np.inf, np.maximum(leave_HE[..., None] - join_HEW, 0).sum(0))
        many_EW = copies.held_EW & (copies.held_EW.sum(1) > 1)[:, None]
        loss_EW = np.where(many_EW, _loss_EW(copies, leave_HE, join_HEW), np.inf)
        promise_W = gain_EW.max(0) - loss_EW.min(0)
        improved = False
        for rank in np.argsort(-promise_W, kind="stable"):
            if tries <= 0 or not promise_W[rank] > 0:
                break
            tries -= 1
            trial = copies.copy()
            drop(trial, int(loss_EW[:, rank].argmin()), int(rank), join_HEW)
            add(trial, int(gain_EW[:, rank].argmax()), int(rank), leave_HE - join_HEW[..., rank])
            reserve(trial, 1)
            if trial.cost() < best - 1e-6 and _excess(trial) <= _excess(copies) + 1e-9:
                copies, best, improved = trial, trial.cost(), True
                break
        if not improved:
            break
    return copies


def _loss_EW(copies: Copies, leave_HE: np.ndarray, join_HEW: np.ndarray) -> np.ndarray:
    """Cost of dropping each copy: its groups join their cheapest other copy."""
    H, E, W = join_HEW.shape
    loss_EW = np.zeros((E, W))
    for rank in range(W):
        others_EW = copies.held_EW.copy()
        others_EW[:, rank] = False
        cheapest_HE = np.where(others_EW, join_HEW, np.inf).min(-1)
        served_HE = copies.serve_HE == rank
        loss_EW[:, rank] = np.where(served_HE, cheapest_HE - leave_HE, 0).sum(0)
    return loss_EW


def _excess(copies: Copies) -> float:
    return float(np.maximum(copies.load_W() - copies.tokens.cap_W * _SLACK, 0).sum())


def improve_copies(
    tokens: LayerTokens, expert_S: np.ndarray, rank_S: np.ndarray, rank_HE: np.ndarray, tries: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fill a layer's free slots and better the use of all copies.

    Args:
        expert_S, rank_S: the slots in use.
        rank_HE: the rank that serves each group.
        tries: exchanges of copies to recount.

    Returns:
        (expert of each slot, its rank, slot that serves each group ``[H, E]``); every slot is in use.
    """
    held_EW = np.zeros((tokens.load_HE.shape[1], len(tokens.slots_W)), bool)
    held_EW[expert_S, rank_S] = True
    copies = Copies(tokens, held_EW, rank_HE.astype(np.int64).copy())
    fill(copies)
    reserve(copies)
    if tries > 0:
        copies = exchange(copies, tries)
    rank_S, expert_S = np.nonzero(copies.held_EW.T)
    slot_EW = np.zeros(held_EW.shape, np.intp)
    slot_EW[expert_S, rank_S] = np.arange(len(expert_S))
    return expert_S, rank_S, slot_EW[np.arange(len(held_EW)), copies.serve_HE]
