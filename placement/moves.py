"""Local search in one layer: exact change of the objective for every exchange of two slots at once.

A layer's slots are *items*: an expert's only copy, or one copy of a replicated expert with the tokens it serves.
With ``m[t, g]`` the items of token t on rank g, the layer costs::

    sum_{t, g} weight[t, g] * (m[t, g] > 0)  +  sum_i linear[i, rank(i)]

(weight 1 everywhere is fan-out; 0 at a token's home makes it dispatch rows; ``linear`` holds what neighbouring layers,
moved bytes and remote choices cost).  Two tables make every exchange's change a sum of four entries:

    alone[i, j] = sum of weight[t, rank(i)] over tokens that use i and j where i is the only item on its rank
    absent[g, j] = sum of weight[t, g] over tokens that use j and nothing on rank g
    change(a <-> b) = cost(a -> rank b) + cost(b -> rank a),
    cost(a -> h) = absent[h, a] + linear[a, h] - alone[a, a] - linear[a, rank a] + alone[a, b]

(the last term: a token that uses both leaves nothing when they change places).  An exchange touches only the tokens
of its two items, so both tables are kept exactly at the cost of a few thousand additions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.heat import Heat, Noise, picks_of

_ONE_ITEM = 1 << 16  # count and sum of items share an integer: count << 16 | sum of item numbers
_ONE = np.float32(1)
_NEVER = 1 << 40  # in the code of a (rank, token) that costs nothing: no number of items there matters
_PRESSURE = 10.0  # cost of a (token, choice) pair above a cap; no exchange saves that much per pair it moves


@dataclass(frozen=True, eq=False)
class LayerData:
    """What the search of one layer needs and does not change.

    Args:
        item_TK: intp, the item that serves each choice of each token.
        expert_S: int64, the expert of each item.
        load_DS: float64, load of each item in each domain that has a cap of its own.
        cap_DW: float64, most load of each rank; one that starts above may only fall.
        weight_WT: float32, cost of token t reaching rank g; ``None`` is 1.
        scale: multiplies the row cost (with ``weight_WT`` None).
        even: cost of a rank's squared distance from its fair load (shared as ``cap_DW`` is), in the first domain.
        noise_SS: float32, covariance of the items' loads on unseen tokens around the first domain's, so that ``even``
            is the cost of the squared distance to be expected; ``None`` is 0.
    """

    item_TK: np.ndarray
    expert_S: np.ndarray
    load_DS: np.ndarray
    cap_DW: np.ndarray
    weight_WT: np.ndarray | None = None
    scale: float = 1.0
    even: float = 0.0
    noise_SS: np.ndarray | None = None

    @property
    def ranks(self) -> int:
        return self.cap_DW.shape[1]


class LayerSearch:
    """State of the search: where each item is, and the tables of the module's docstring."""

    def __init__(self, data: LayerData, rank_S: np.ndarray) -> None:
        assert len(data.expert_S) < _ONE_ITEM, f"{len(data.expert_S)} slots in a layer"
        self.data, self.W, self.S = data, data.ranks, len(data.expert_S)
        flat = data.item_TK.ravel()
        order = np.argsort(flat, kind="stable")
        first = np.searchsorted(flat[order], np.arange(self.S + 1))
        K = max(1, data.item_TK.shape[1])
        self.tokens = [order[first[i] : first[i + 1]] // K for i in range(self.S)]
        copies_S = np.bincount(data.expert_S)[data.expert_S]
        self.replicated = bool((copies_S > 1).any())
        self.rank_S = rank_S.astype(np.intp).copy()
        self.weight_WT, self.scale = data.weight_WT, np.float32(data.scale)
        free_WT = None
        if data.weight_WT is not None and data.weight_WT.size:
            most, free_WT = data.weight_WT.max(), data.weight_WT == 0
            if (free_WT | (data.weight_WT == most)).all():  # as with equal links: count where a row costs, weigh later
                self.weight_WT, self.scale = None, np.float32(most)
        self._fill(free_WT)

    def _fill(self, free_WT: np.ndarray | None) -> None:
        data, S, W = self.data, self.S, self.W
        T = len(data.item_TK)
        self.code_WT = np.zeros((W, T), np.intp)
        if free_WT is not None:
            self.code_WT[free_WT] = _NEVER
        cell = self.rank_S[data.item_TK] * T + np.arange(T)[:, None]
        np.add.at(self.code_WT.reshape(-1), cell.ravel(), (data.item_TK + _ONE_ITEM).ravel())
        # rows 0..S-1: alone; S..S+W-1: absent; the last takes tokens with two or more items on the rank
        self.table = np.zeros((S + W + 1, S), np.float32)
        for rank, code_T in enumerate(self.code_WT):
            row_T = np.where(code_T == 0, S + rank, np.where(code_T < 2 * _ONE_ITEM, code_T - _ONE_ITEM, S + W))
            where = np.flatnonzero(row_T != S + W)
            cell = row_T[where, None] * S + data.item_TK[where]
            np.add.at(self.table.reshape(-1), cell.ravel(), self._weights(rank, where))
        self.load_DW = np.stack([np.bincount(self.rank_S, load_S, W) for load_S in data.load_DS])
        self.held_WE = np.zeros((W, int(data.expert_S.max()) + 1), bool)
        self.held_WE[self.rank_S, data.expert_S] = True
        self.noise_SS = None  # in costs; noise_SW: of an item with all on a rank
        if data.even and data.noise_SS is not None:
            self.noise_SS = data.noise_SS * np.float32(2 * data.even)
            self.noise_SW = self.noise_SS @ (self.rank_S[:, None] == np.arange(W)).astype(np.float32)

    def row_cost(self) -> float:
        """The first sum of the module's docstring."""
        reached_WT = (self.code_WT > 0) & (self.code_WT < _NEVER)
        if self.weight_WT is not None:
            return float(self.weight_WT[reached_WT].sum(dtype=np.float64))
        return float(reached_WT.sum()) * (1.0 if self.data.weight_WT is None else float(self.scale))

    def swap(self, a: int, b: int) -> None:
        """Exchange the ranks of two items."""
        g, h = self.rank_S[a], self.rank_S[b]
        self._take(a, g)
        self._take(b, h)
        self._put(a, h)
        self._put(b, g)
        self.rank_S[a], self.rank_S[b] = h, g
        change_D = self.data.load_DS[:, b] - self.data.load_DS[:, a]
        self.load_DW[:, g] += change_D
        self.load_DW[:, h] -= change_D
        if self.noise_SS is not None:
            change_S = self.noise_SS[b] - self.noise_SS[a]
            self.noise_SW[:, g] += change_S
            self.noise_SW[:, h] -= change_S
        if self.replicated:
            expert_S = self.data.expert_S
            self.held_WE[[g, h], expert_S[[a, b]]] = False
            self.held_WE[[g, h], expert_S[[b, a]]] = True

    def follow(self, rank_S: np.ndarray) -> bool:
        """Take over a relabelling of ranks; whether ``rank_S`` was one (else nothing changes)."""
        to_W = np.full(self.W, -1)
        to_W[self.rank_S] = rank_S
        if not (to_W[self.rank_S] == rank_S).all() or not np.array_equal(np.sort(to_W), np.arange(self.W)):
            return False
        from_W = np.argsort(to_W)
        self.rank_S = rank_S.astype(np.intp).copy()
        self.code_WT, self.held_WE = self.code_WT[from_W], self.held_WE[from_W]
        self.load_DW = self.load_DW[:, from_W]
        if self.noise_SS is not None:
            self.noise_SW = self.noise_SW[:, from_W]
        self.table[self.S : -1] = self.table[self.S : -1][from_W]
        return True

    def deltas(self, linear_SW: np.ndarray, rows: slice | np.ndarray = slice(None)) -> np.ndarray:
        """float32 ``[rows, S]``: change of the objective if row's and column's item change places; inf: illegal."""
        rank_S, S, scale = self.rank_S, self.S, self.scale
        alone_SS, absent_WS = self.table[:S], self.table[S:-1]
        at = np.arange(S)
        cost_SW = absent_WS.T * scale + linear_SW
        own_S = alone_SS[at, at] * scale + linear_SW[at, rank_S]
        if self.noise_SS is not None:
            cost_SW += self.noise_SW
            own_S += self.noise_SW[at, rank_S] - self.noise_SS[at, at]
        there = cost_SW[rows].take(rank_S, 1)
        there -= own_S[rows][:, None]
        if isinstance(rows, slice):
            there += alone_SS * scale
            if self.noise_SS is not None:
                there -= self.noise_SS
            delta = there + there.T
        else:
            back = cost_SW.take(rank_S[rows], 1)
            back -= own_S[:, None]
            delta = there + back.T
            delta += (alone_SS[rows] + alone_SS[:, rows].T) * scale
            if self.noise_SS is not None:
                delta -= 2 * self.noise_SS[rows]
        self._press(delta, rows)
        if self.data.even:
            self._even(delta, rows)
        delta[self._illegal(rows)] = np.inf
        return delta

    def _press(self, delta: np.ndarray, rows: slice | np.ndarray) -> None:
        """Make exchanges that relieve a rank above its cap pay, so that an overloaded start heals."""
        rank_S = self.rank_S
        for load_S, excess_W in zip(self.data.load_DS, self.load_DW - self.data.cap_DW):
            if not (excess_W > 1e-6 * self.data.cap_DW.max()).any():
                continue
            before_S = np.maximum(excess_W, 0).take(rank_S)
            gain = load_S - load_S[rows][:, None]  # what the row's rank gains
            mine = np.maximum(excess_W.take(rank_S[rows])[:, None] + gain, 0) - before_S[rows][:, None]
            other = np.maximum(excess_W.take(rank_S) - gain, 0) - before_S
            delta += (_PRESSURE * (mine + other)).astype(np.float32)

    def _even(self, delta: np.ndarray, rows: slice | np.ndarray) -> None:
        """Add what loads further from, or nearer to, the fair ones cost."""
        load_S, over_S = self.data.load_DS[0], self.unfair_W().take(self.rank_S)
        gain = (load_S - load_S[rows][:, None]).astype(np.float32)  # what the row's rank gains
        apart = (over_S[rows][:, None] - over_S).astype(np.float32)
        apart += gain
        apart *= gain
        apart *= np.float32(2 * self.data.even)
        delta += apart

    def unfair_W(self) -> np.ndarray:
        """float64 ``[W]``: load above the fair one, in the first domain."""
        cap_W, load_W = self.data.cap_DW[0], self.load_DW[0]
        return load_W - cap_W * (load_W.sum() / cap_W.sum())

    def _illegal(self, rows: slice | np.ndarray) -> np.ndarray:
        """Exchanges on one rank, over a cap, or that put two copies of an expert on one rank."""
        rank_S, load_DS, expert_S = self.rank_S, self.data.load_DS, self.data.expert_S
        bad = rank_S[rows][:, None] == rank_S
        for load_S, over_W in zip(load_DS, np.minimum(self.load_DW - self.data.cap_DW, 0)):
            over_S = over_W.take(rank_S) - load_S
            bad |= over_S[rows][:, None] + load_S > 0
            bad |= load_S[rows][:, None] + over_S > 0
        if self.replicated:
            bad |= self.held_WE[rank_S[:, None], expert_S[rows]].T
            bad |= self.held_WE[rank_S[rows][:, None], expert_S]
        return bad

    def anneal(self, linear_SW: np.ndarray, heat: Heat, noise: Noise) -> int:
        """Exchanges drawn with odds ``exp(-delta / temperature)``; returns how many were made.

        Exchanges between distinct pairs of ranks change nothing for each other, so several are drawn at a time.
        """
        made, window, picks = 0, min(self.S, heat.rows), picks_of(self.W)
        for step in range(0, heat.steps, picks):
            temperature = np.float32(heat.start * (heat.stop / heat.start) ** (step / heat.steps))
            rows = slice(None) if window == self.S else noise.some(self.S, window)
            delta = self.deltas(linear_SW, rows)
            key = noise.gumbel(delta.size).reshape(delta.shape) * temperature
            key -= delta
            for left in range(min(picks, heat.steps - step), 0, -1):
                row, b = divmod(int(key.argmax()), self.S)
                if key[row, b] == -np.inf:
                    break
                a = row if window == self.S else int(rows[row])
                if left > 1:
                    near_S = (self.rank_S == self.rank_S[a]) | (self.rank_S == self.rank_S[b])
                    key[:, near_S] = -np.inf
                    key[near_S[rows]] = -np.inf
                self.swap(a, b)
                made += 1
        return made

    def descend(self, linear_SW: np.ndarray, limit: int) -> int:
        """The best exchange until none helps (or ``limit`` exchanges); returns how many were made."""
        for made in range(limit):
            delta = self.deltas(linear_SW)
            a, b = divmod(int(delta.argmin()), self.S)
            if not delta[a, b] < -1e-3:  # counts are whole numbers: less is rounding
                return made
            self.swap(a, b)
        return limit

    def _weights(self, rank: int, tokens: np.ndarray) -> np.ndarray | np.float32:
        """Weight of each (token, choice) on ``rank``, flat."""
        if self.weight_WT is None:
            return _ONE
        return np.repeat(self.weight_WT[rank].take(tokens), self.data.item_TK.shape[1])

    def _take(self, item: int, rank: int) -> None:
        tokens, code_T = self.tokens[item], self.code_WT[rank]
        code = code_T.take(tokens)
        code -= _ONE_ITEM + item
        code_T[tokens] = code
        self.table[self.S + rank] += self.table[item]  # tokens that had it alone there now reach the rank no more
        self.table[item] = 0
        self._partners(np.add, rank, tokens, code)

    def _put(self, item: int, rank: int) -> None:
        tokens, code_T = self.tokens[item], self.code_WT[rank]
        code = code_T.take(tokens)
        code_T[tokens] = code + (_ONE_ITEM + item)
        new = tokens.compress(code == 0)
        weights = None if self.weight_WT is None else self._weights(rank, new)
        alone = np.bincount(self.data.item_TK.take(new, 0).ravel(), weights, self.S)
        self.table[item] = alone
        self.table[self.S + rank] -= self.table[item]
        self._partners(np.subtract, rank, tokens, code)

    def _partners(self, change: np.ufunc, rank: int, tokens: np.ndarray, code: np.ndarray) -> None:
        """Tokens with one item on ``rank`` by ``code``: it is alone there without the item that moves."""
        few = np.flatnonzero((code < 2 * _ONE_ITEM) & (code > 0))
        tokens = tokens.take(few)
        row = code.take(few)
        row -= _ONE_ITEM
        row *= self.S
        cell = self.data.item_TK.take(tokens, 0)
        cell += row[:, None]
        change.at(self.table.reshape(-1), cell.ravel(), self._weights(rank, tokens))
