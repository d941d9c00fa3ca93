#!/usr/bin/env python3
"""A picture of multi_gpu_report.py's JSON: exchanges over tokens, and a whole model under its placements."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

COLOUR = {"p2p": "#1b6ca8", "padded": "#d1495b", "alltoall": "#8d8d8d", "oneshot": "#66a182", "plain": "#000000"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path, help="as multi_gpu_report.py writes it")
    parser.add_argument("picture", type=Path, help="docs/results/multi_gpu.png, say")
    args = parser.parse_args()
    report = json.loads(args.json.read_text(encoding="utf-8"))
    found = {name: part.get("found") for name, part in report["parts"].items()}
    panels = [(draw, found[name]) for name, draw in (("exchanges", exchanges), ("model", model)) if found.get(name)]
    figure, axes = plt.subplots(1, len(panels), figsize=(6.2 * len(panels), 4.4), squeeze=False)
    for axis, (draw, values) in zip(axes[0], panels):
        draw(axis, values)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(report["where"], fontsize=11)
    figure.tight_layout()
    figure.savefig(args.picture, dpi=110)
    return 0


def exchanges(axis: plt.Axes, found: dict) -> None:
    """Dispatch and combine of one layer over tokens a rank, reduce mode, even routing."""
    cases = [each for each in found["results"] if each["case"]["routing"] == "even"]
    cases = [each for each in cases if each["case"]["combine"] == cases[0]["case"]["combine"]]
    for name in dict.fromkeys(each["case"]["exchange"] for each in cases):
        mine = [each for each in cases if each["case"]["exchange"] == name]
        axis.plot([each["case"]["tokens"] for each in mine], [each["us"] for each in mine], "o-", color=COLOUR[name],
                  label=f"{name} (graph)" if mine[0]["graph_us"] else f"{name} (host)")  # fmt: skip
        plain = [(each["case"]["tokens"], each["plain_us"]) for each in mine]
    axis.plot(*zip(*plain), "k:", label="all_to_all_single of these rows, twice")
    axis.set(xscale="log", yscale="log", xlabel="tokens a rank", ylabel="us, dispatch and combine",
             title=f"One layer's exchange, hidden {cases[0]['case']['hidden']}")  # fmt: skip
    axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0.02, 0.9))


def model(axis: plt.Axes, found: dict) -> None:
    """Prefill tokens/s: measured as bars, simulated as marks."""
    good = [row for row in found["rows"] if "prefill_tokens_per_s" in row]
    names = list(dict.fromkeys((row["plan"], row["homes"]) for row in good))
    said = {(row["plan"], row["homes"], row["overlap"]): row["prefill_tokens_per_s"] for row in found["predicted"]}
    for shift, (lanes, colour) in enumerate((("off", "#9db4c0"), ("on", "#1b6ca8"))):
        at = {name: place + 0.38 * (shift - 0.5) for place, name in enumerate(names)}
        mine = [row for row in good if row["overlap"] == lanes]
        where = [at[row["plan"], row["homes"]] for row in mine]
        axis.bar(where, [row["prefill_tokens_per_s"] / 1e3 for row in mine], 0.36, color=colour,
                 label="two lanes" if lanes == "on" else "one lane")  # fmt: skip
        guesses = [(x, said.get((row["plan"], row["homes"], lanes))) for x, row in zip(where, mine)]
        guesses = [(x, value / 1e3) for x, value in guesses if value]
        if guesses:
            axis.plot(*zip(*guesses), "kD", markersize=4, label="simulated" if lanes == "off" else None)
    labels = [f"{plan}\n{'affinity' if homes == 'affinity' else 'in turn'}" for plan, homes in names]
    axis.set_xticks(range(len(names)), labels, fontsize=8)
    axis.set(ylabel="prefill, thousand tokens/s", title="Whole model by placement and homes")
    axis.set_ylim(0, 1.25 * axis.get_ylim()[1])
    axis.legend(frameon=False, fontsize=8, ncols=3, loc="upper right")


if __name__ == "__main__":
    sys.exit(main())
