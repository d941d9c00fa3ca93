"""A plan, explained: costs before and after, load per GPU and layer, traffic between ranks; data and pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from placement import cost
from placement.plan import Plan
from placement.trace import Trace

SCALARS = (
    ("compute_tail", "fullest GPU's load over the mean, mean of layers"),
    ("compute_tail_worst_layer", "the same, worst layer"),
    ("compute_tail_lp", "with the best split over replicas"),
    ("fan_out", "distinct ranks per token and layer"),
    ("dispatch_rows", "rows sent to other ranks, per token and layer"),
    ("combine_rows", "rows sent back, per token and layer"),
    ("locality", "expert pairs of consecutive layers on one GPU"),
    ("home_tail", "fullest home's tokens over the mean"),
    ("link_tail", "seconds of the heaviest link, one step"),
    ("step_bytes", "bytes of one step"),
    ("step_seconds", "predicted seconds of one step"),
)


@dataclass(frozen=True, eq=False)
class Report:
    """Two plans and their costs on the same tokens and machine; ``load_LE`` int64 is the trace's load per expert."""

    before: Plan
    after: Plan
    costs_before: cost.Costs
    costs_after: cost.Costs
    load_LE: np.ndarray
    source: str

    def rows(self) -> list[tuple[str, float, float, str]]:
        """(figure, before, after, meaning)."""
        b, a = (costs.to_dict(arrays=False) for costs in (self.costs_before, self.costs_after))
        return [(name, b[name], a[name], meaning) for name, meaning in SCALARS]

    def to_dict(self) -> dict:
        return {
            "trace": self.source,
            "tokens": self.costs_after.tokens,
            "moved_copies": moved_copies(self.before, self.after),
            "before": {"made_by": self.before.made_by, **self.costs_before.to_dict()},
            "after": {"made_by": self.after.made_by, **self.costs_after.to_dict()},
            "expert_load": self.load_LE.tolist(),
        }


def make_report(
    before: tuple[Plan, np.ndarray | None], after: tuple[Plan, np.ndarray | None], trace: Trace, topology, **options
) -> Report:
    """``before`` and ``after``: a plan and its home ranks (``None``: round-robin).

    ``options``: ``combine`` and ``calibration`` of :func:`placement.cost.evaluate`.
    """
    costs = [cost.evaluate(plan, trace, topology, homes=homes, **options) for plan, homes in (before, after)]
    return Report(before[0], after[0], *costs, trace.load_LE(), trace.source)


def moved_copies(before: Plan, after: Plan) -> int | None:
    """Expert copies that a rank holds after and not before; ``None`` where the number of ranks differs."""
    if before.ranks != after.ranks:
        return None
    return int(((after.copy_slot_LEW >= 0) & (before.copy_slot_LEW < 0)).sum())


# -- pictures ---------------------------------------------------------------------------------------------------------


def plot_report(report: Report, path: str | Path, solution: dict | None = None) -> None:
    """Load per GPU and layer before and after, rank-to-rank traffic before and after, objective over time.

    ``solution`` is the JSON of ``solve --json``; without its history the last panel shows the tail per layer.
    """
    figure, axes = _figure(2, 3, (16, 9))
    loads = [_relative(costs.load_LW) for costs in (report.costs_before, report.costs_after)]
    top = max(float(load.max()) for load in loads)
    for axis, load, plan in zip(axes[0], loads, (report.before, report.after)):
        _load_panel(axis, load, top, plan)
    _tail_panel(axes[0][2], *loads, report.after.shape.moe_layers)
    traffic = [costs.traffic_WW for costs in (report.costs_before, report.costs_after)]
    off = [np.where(np.eye(len(t), dtype=bool), np.nan, t) for t in traffic]
    heaviest = max([float(np.nanmax(t)) for t in off if t.size > 1], default=1.0)
    for axis, rows, plan in zip(axes[1], off, (report.before, report.after)):
        _traffic_panel(axis, rows, heaviest, plan)
    _history_panel(axes[1][2], report, solution)
    name = report.after.shape.name or "plan"
    figure.suptitle(f"{name}: {report.after.ranks} GPUs, {report.costs_after.tokens:,} tokens")
    _save(figure, path)


def plot_frontier(rows: list[dict], path: str | Path, title: str) -> None:
    """Held-out compute tail against fan-out and locality; a line joins the methods that no other beats in both."""
    figure, axes = _figure(1, 2, (14, 6))
    for axis, name, better in zip(axes[0], ("fan_out", "locality"), (1, -1)):
        points = [(row["held_out"]["compute_tail"], row["held_out"][name], row["method"]) for row in rows]
        best, line = float("inf"), []
        for tail, value, _ in sorted(points, key=lambda p: (p[0], better * p[1])):
            if better * value < best:
                best = better * value
                line.append((tail, value))
        axis.plot(*zip(*line), color="tab:blue", alpha=0.5, drawstyle="steps-post", zorder=1)
        axis.set_xlabel("held-out compute tail (fullest GPU over mean; lower is better)")
        axis.set_ylabel("fan-out (lower is better)" if better > 0 else "locality (higher is better)")
        axis.margins(x=0.15, y=0.1)
        axis.grid(alpha=0.3)
        _labelled_points(axis, points)
    figure.suptitle(title)
    _save(figure, path)


def _figure(rows: int, columns: int, size: tuple[float, float]):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _save(figure, path: str | Path) -> None:
    figure.savefig(path, dpi=110)


def _relative(load_LW: np.ndarray) -> np.ndarray:
    """Each rank's load over the layer's mean."""
    return load_LW / np.maximum(load_LW.mean(-1, keepdims=True), 1e-300)


def _load_panel(axis, load_LW: np.ndarray, top: float, plan: Plan) -> None:
    image = axis.imshow(load_LW, aspect="auto", cmap="magma_r", vmin=min(0.5, float(load_LW.min())), vmax=top)
    axis.figure.colorbar(image, ax=axis, label="load over mean")
    axis.set_title(f"load per GPU and layer: {plan.made_by or 'plan'}")
    axis.set_xlabel("GPU")
    axis.set_ylabel("MoE layer (model index)")
    ticks = np.unique(np.linspace(0, len(load_LW) - 1, min(len(load_LW), 10)).round().astype(int))
    axis.set_yticks(ticks, [plan.shape.moe_layers[i] for i in ticks])
    _rank_ticks(axis.set_xticks, load_LW.shape[1])


def _rank_ticks(setter, ranks: int) -> None:
    setter(np.arange(0, ranks, max(1, ranks // 16)))


def _tail_panel(axis, before_LW: np.ndarray, after_LW: np.ndarray, moe_layers: tuple[int, ...]) -> None:
    axis.plot(moe_layers, before_LW.max(1), label="before", color="tab:gray")
    axis.plot(moe_layers, after_LW.max(1), label="after", color="tab:blue")
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_title("fullest GPU over mean, per layer")
    axis.set_xlabel("MoE layer (model index)")
    axis.legend()
    axis.grid(alpha=0.3)


def _traffic_panel(axis, rows_WW: np.ndarray, heaviest: float, plan: Plan) -> None:
    image = axis.imshow(rows_WW, cmap="viridis", vmin=0, vmax=heaviest)
    axis.figure.colorbar(image, ax=axis, label="rows dispatched, all layers")
    axis.set_title(f"traffic between ranks: {plan.made_by or 'plan'}")
    axis.set_xlabel("serving rank")
    axis.set_ylabel("home rank")
    _rank_ticks(axis.set_xticks, len(rows_WW))
    _rank_ticks(axis.set_yticks, len(rows_WW))


def _history_panel(axis, report: Report, solution: dict | None) -> None:
    history = (solution or {}).get("history") or []
    if not history:
        sent = [costs.traffic_WW.copy() for costs in (report.costs_before, report.costs_after)]
        for rows in sent:
            np.fill_diagonal(rows, 0)
        positions = np.arange(report.after.ranks)
        if len(sent[0]) == len(sent[1]):
            axis.bar(positions - 0.2, sent[0].sum(0), 0.4, label="before", color="tab:gray")
            axis.bar(positions + 0.2, sent[1].sum(0), 0.4, label="after", color="tab:blue")
            axis.legend(loc="lower right")
        axis.set_title("rows received from other ranks")
        axis.set_xlabel("rank")
        return
    seconds, best, bound = zip(*history)
    axis.plot(seconds, best, drawstyle="steps-post", marker=".", label="best objective", color="tab:blue")
    known = [(s, b) for s, b in zip(seconds, bound) if b is not None]
    if known:
        axis.plot(*zip(*known), drawstyle="steps-post", marker=".", label="bound", color="tab:red")
    elif solution.get("bound") is not None:
        axis.axhline(solution["bound"], label="bound", color="tab:red")
    axis.set_title(f"{solution['objective_name']} over time ({solution['method']}, {solution['status']})")
    axis.set_xlabel("seconds")
    axis.legend()
    axis.grid(alpha=0.3)


def _labelled_points(axis, points: list[tuple[float, float, str]]) -> None:
    """Scatter with names. Points that meet share a label; labels stand clear of each other, joined by a thin line."""
    axis.scatter([p[0] for p in points], [p[1] for p in points], color="tab:blue", zorder=2)
    (left, right), (bottom, top) = axis.get_xlim(), axis.get_ylim()
    groups: list[tuple[float, float, list[str]]] = []  # in shares of the axes
    for x, y, name in sorted(points, key=lambda p: (p[1], p[0])):
        share = ((x - left) / (right - left), (y - bottom) / (top - bottom))
        near = [g for g in groups if abs(g[0] - share[0]) < 0.015 and abs(g[1] - share[1]) < 0.015]
        if near:
            near[0][2].append(name)
        else:
            groups.append((*share, [name]))
    lowest = {True: -1.0, False: -1.0}  # where the next label of each side may start
    for x, y, names in groups:
        on_right = x < 0.6
        height = max(y - 0.015, lowest[on_right])
        lowest[on_right] = height + 0.045
        axis.annotate(
            ", ".join(names),
            (x, y),
            (x + (0.02 if on_right else -0.02), height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            ha="left" if on_right else "right",
            fontsize=9,
            arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": "gray"},
        )
