"""The report of multi_gpu_report.py as tables."""

from __future__ import annotations


def markdown(report: dict) -> str:
    lines = [f"# {report['where']}", "", f"{report['date']}, torch {report['torch']}; `{report['command']}`", ""]
    if "SHARING" in report["where"]:
        lines += ["Ranks share a GPU and take turns on it: times say nothing about machines with a GPU for each.", ""]
    writers = {"links": _links, "promises": _promises, "exchanges": _exchanges, "model": _model}
    for name, part in report["parts"].items():
        lines += [f"## {name.capitalize()} ({part['seconds']:.0f} s)", ""]
        if part["found"]:
            lines += [*writers.get(name, _lines)(part["found"]), ""]
        if "failed" in part:
            lines += [f"Cut short: {part['failed'].strip().splitlines()[-1]}", ""]
    return "\n".join(lines)


def _lines(found: dict) -> list[str]:
    """What another script printed, or a plain table."""
    if "lines" in found:
        return [f"`{found['command']}`", "", "```", *found["lines"], "```"]
    return [f"- {name}: {value}" for name, value in found.items()]


def _links(found: dict) -> list[str]:
    ranks = range(len(found["gb_per_s"]))
    lines = [f"{found['backend']}: all_reduce {found['all_reduce']}; memory of peers: {found['peer_memory']}."]
    lines += [f"Measured by {found['measured_by']}, one link at a time, GB/s (microseconds of 4 KiB):", ""]
    rate, late = found["gb_per_s"], found["latency_us"]
    cells = [[f"{rate[a][b]:.1f} ({late[a][b]:.1f})" if a != b else "" for b in ranks] for a in ranks]
    lines += _table(["from \\ to", *map(str, ranks)], [[str(a), *row] for a, row in enumerate(cells)])
    at_once = f"{found['all_pairs_gb_per_s']:.1f} GB/s by all_to_all_single"
    if "all_pairs_copy_gb_per_s" in found:
        at_once += f", {found['all_pairs_copy_gb_per_s']:.1f} by copies"
    return [*lines, "", f"All pairs at once, sent by each rank: {at_once}."]


def _promises(found: list[dict]) -> list[str]:
    word = {True: "holds", False: "**broken**", None: "not run"}
    rows = []
    for each in found:
        why = "".join(str(each.get("why", "")).strip().splitlines()[-1:])[:160]
        rows.append([each["promise"], each["case"], word[each["holds"]], f"{each.get('seconds', 0):.1f}", why])
    return _table(["promise", "case", "", "s", "why"], rows)


def _exchanges(found: dict) -> list[str]:
    head = ["exchange", "combine", "tokens", "hidden", "routing", "dispatch us", "combine us", "in a graph us", "GB/s",
            "of the link", "over plain"]  # fmt: skip
    rows = []
    for each in found["results"]:
        case, graph = each["case"], each["graph_us"]
        rows.append([
            case["exchange"], case["combine"], str(case["tokens"]), str(case["hidden"]), case["routing"],
            f"{each['dispatch_us']:.1f}", f"{each['combine_us']:.1f}", f"{graph:.1f}" if graph else "-",
            f"{each['gb_per_s']:.1f}", f"{100 * each['share_of_link']:.0f} %", f"{each['ratio_to_plain']:.2f}",
        ])  # fmt: skip
    return [f"Plain all_to_all_single of large blocks: {found['link_gb_per_s']:.1f} GB/s.", "", *_table(head, rows)]


def _model(found: dict) -> list[str]:
    layers, choices, experts = found["shape"]
    lines = [f"Routing of `{found['trace']}` ({layers} layers, {experts} experts, {choices} choices).", ""]
    head = ["plan", "homes", "lanes", "prefill tokens/s", "over linear", "simulated", "ms a step", "simulated",
            "hidden", "in graphs", "decode tokens/s", "over linear", "ms a step", "remote rows"]  # fmt: skip
    good = [row for row in found["rows"] if "prefill_tokens_per_s" in row]
    base = next((row for row in good if row["plan"] == "linear" and row["overlap"] == "off"), None)
    said = {(row["plan"], row["homes"], row["overlap"]): row for row in found["predicted"]}
    rows = []
    for row in good:
        guess = said.get((row["plan"], row["homes"], row["overlap"]))
        drawn = "decode_tokens_per_s" in row
        rows.append([
            row["plan"], row["homes"], row["overlap"], f"{row['prefill_tokens_per_s']:.0f}",
            _over(row, base, "prefill_tokens_per_s"), _over(guess, base, "prefill_tokens_per_s"),
            f"{row['prefill_ms']:.1f}", f"{guess['prefill_ms']:.1f}" if guess else "-",
            f"{100 * row['hidden']:.0f} %" if "hidden" in row else "-", f"{100 * row['in_graphs']:.0f} %",
            f"{row['decode_tokens_per_s']:.0f}" if drawn else "-",
            _over(row, base, "decode_tokens_per_s") if drawn else "-",
            f"{row['decode_ms']:.2f}" if drawn else "-", f"{row['remote_rows']:.3f}",
        ])  # fmt: skip
    lines += _table(head, rows)
    timed = [row for row in good if "stage_us" in row]
    if timed:
        lines += ["", "Microseconds of a layer's stages, all of them timed (`arrive` and `sum` wait for rows):", ""]
        stages = [name for name in timed[0]["stage_us"] if any(row["stage_us"][name] for row in timed)]
        times = [[f"{row['stage_us'][name]:.0f}" for name in stages] for row in timed]
        names = [[row["plan"], row["homes"], row["overlap"]] for row in timed]
        lines += _table(["plan", "homes", "lanes", *stages], [a + b for a, b in zip(names, times)])
    for row in found["rows"]:
        if "failed" in row:
            lines.append(f"\n{row['plan']}, {row.get('homes', '')}, lanes {row.get('overlap', '')}: {row['failed']}")
    return lines


def _over(row: dict | None, base: dict | None, key: str) -> str:
    return "-" if base is None or row is None else f"{100 * (row[key] / base[key] - 1):+.1f} %"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
