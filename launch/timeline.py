"""``--timeline FILE``: what the ranks timed, as one trace file and a few lines."""

from __future__ import annotations

import json
from collections import defaultdict

from epmoe.moe.timeline import Hidden, Span, chrome_events, hidden_of
from launch.prompts import cannot_write
from placement.errors import UserError
from placement.textfiles import whole_file

ORDER = (
    "embed",
    "attention",
    "router",
    "dispatch",
    "send",
    "shared",
    "arrive",
    "experts",
    "combine",
    "sum",
    "mlp",
    "head",
)


def write_timeline(path: str, messages: list[dict]) -> str:
    """Write a Chrome trace (for ui.perfetto.dev) of the ranks' ``timeline`` messages; what to tell the user.

    Clocks of one machine's ranks agree; those of several machines are not aligned.

    Raises ``UserError`` if it cannot be written.
    """
    by_rank = spans_by_rank(messages)
    events = [event for rank in sorted(by_rank) for event in chrome_events(rank, by_rank[rank])]
    try:
        with whole_file(path) as file:
            file.write(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())
    except OSError as error:
        raise UserError(cannot_write(path, error)) from None
    full = any(message["full"] for message in messages)
    count = sum(len(spans) for spans in by_rank.values())
    return f"timeline {path}: {count} stages{'; the limit was reached, later steps are not in it' if full else ''}"


def spans_by_rank(messages: list[dict]) -> dict[int, list[Span]]:
    by_rank: dict[int, list[Span]] = defaultdict(list)
    for message in messages:
        by_rank[message["rank"]] += [Span(*fields) for fields in message["spans"]]
    return by_rank


def summary(by_rank: dict[int, list[Span]]) -> list[str]:
    """Time of each stage, and how much of the communication lay beside compute: in all and by layer."""
    times: dict[str, list[float]] = defaultdict(list)
    for spans in by_rank.values():
        for span in spans:
            times[span.stage].append(span.end - span.begin)
    known = [stage for stage in ORDER if stage in times]
    lines = ["stage, mean us (times): " + ", ".join(f"{s} {_mean(times[s]):.0f} ({len(times[s])})" for s in known)]
    hidden = merge_hidden([hidden_of(spans) for spans in by_rank.values()])
    total = hidden.pop(-1, Hidden(0.0, 0.0))
    if not total.communication:
        return [*lines, "communication hidden: there was none"]
    lines.append(f"communication hidden: {total.share:.0%} of {total.communication / 1e3:.1f} ms on all ranks")
    lines.append("by layer: " + ", ".join(f"{layer} {part.share:.0%}" for layer, part in sorted(hidden.items())))
    return lines


def merge_hidden(ranks: list[dict[int, Hidden]]) -> dict[int, Hidden]:
    """Sums over ranks, by layer."""
    merged: dict[int, Hidden] = {}
    for found in ranks:
        for layer, part in found.items():
            before = merged.get(layer, Hidden(0.0, 0.0))
            merged[layer] = Hidden(before.communication + part.communication, before.beside + part.beside)
    return merged


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
