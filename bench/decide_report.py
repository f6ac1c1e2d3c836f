"""The page of `bench/decide.py`."""

from __future__ import annotations

import statistics
from typing import Any

from decide_split import split_table


def page(result: dict[str, Any]) -> str:
    """Return all pieces as Markdown."""
    model = result["model"]
    title, commands = (
        "The decision: prediction error and regret",
        "predict`, `... stall`, `... regret",
    )
    if "split" in result:
        title, commands = "The decision: loads within the step", "split"
    lines = [
        f"# {title}",
        "",
        f"{result['device']}, {result['date']}, load average {result['load']} at the end; vLLM on "
        f"the CPU, 1 thread, {model['num_layers']} layers, hidden {model['hidden_size']}, "
        f"{result['kv_nbytes_per_token']} bytes of KV a token, steps of "
        f"{result['step_tokens']} tokens. Bandwidth as a multiple of the one at which loading a "
        f"prompt of 2,048 tokens takes as long as computing it ({result['unit'] / 1e6:.0f} MB/s). "
        f"`python bench/decide.py {commands}`",
        "",
    ]
    if "predict" in result:
        lines += predict_lines(result["predict"]["rows"])
    if result.get("cells"):
        lines += regret_lines(result["cells"])
    if "stall" in result:
        lines += stall_lines(result["stall"])
    if "split" in result:
        lines += split_table(result["split"])
    return "\n".join(lines) + "\n"


def predict_lines(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## Prediction error",
        "",
        "|predicted - measured| / measured of the time to the first token, on lengths that were "
        "not fitted; one request at a time. Spread: interquartile range over median of repeats.",
        "",
        "| what | bandwidth | tokens | measured ms | median error | of the load | spread | runs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        load = f"{statistics.median(row['load_errors']):.1%}" if row["load_errors"] else ""
        lines.append(
            f"| {row['what']} | {row['bandwidth_factor']:g}x | {row['num_tokens'] - 1} | "
            f"{row['measured_ms']:.0f} | {statistics.median(row['errors']):.1%} | {load} | "
            f"{row['spread']:.1%} | {len(row['errors'])} |"
        )
    lines.append("")
    for what in ("recompute", "reload"):
        mine = [row for row in rows if row["what"] == what]
        error = statistics.median(e for row in mine for e in row["errors"])
        allowed = max(0.10, 1.5 * statistics.median(row["spread"] for row in mine))
        met = "met" if error <= allowed else "missed"
        lines.append(f"- {what}: median error {error:.1%}, target <= {allowed:.1%}: {met}")
    return [*lines, ""]


def regret_lines(cells: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## Regret",
        "",
        "Mean time to the first token of requests that come at once, ms, medians; regret of "
        "deciding against the better of the other two. Target: <= 5 %, or the spread where that is "
        "more.",
        "",
        "| requests | bandwidth | tokens | recompute | reload | kvtiers | regret | spread | blocks "
        "loaded |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for c in cells:
        ms = c["ms"]
        lines.append(
            f"| {c['concurrency']} | {c['bandwidth_factor']:g}x | {c['num_tokens'] - 1} | "
            f"{ms['never']:.0f} | {ms['always']:.0f} | {ms['auto']:.0f} | {c['regret']:+.1%} | "
            f"{c['spread']:.1%} | {c['blocks_loaded']:.0f} |"
        )
    met = [c for c in cells if c["regret"] <= max(0.05, c["spread"])]
    worst = max(cells, key=lambda c: c["regret"])
    return [
        *lines,
        "",
        f"- {len(met)} of {len(cells)} cells within the target; median regret "
        f"{statistics.median(c['regret'] for c in cells):+.1%}, worst {worst['regret']:+.1%} "
        f"({worst['concurrency']} requests of {worst['num_tokens'] - 1} tokens at "
        f"{worst['bandwidth_factor']:g}x)",
        "",
    ]


def stall_lines(result: dict[str, Any]) -> list[str]:
    served, computed = result["served"], result["computed_ms"]
    phases = {name: [s for s in served if s["phase"] == name] for name in ("stalled", "after")}
    before = statistics.median(s["ttft_ms"] for s in served if s["phase"] == "before")
    hurt = [s for s in phases["stalled"] if s["ttft_ms"] > 1.5 * computed]
    quiet = [s["ttft_ms"] for s in phases["stalled"] if not s["num_loaded"] + s["num_failed"]]
    took = ", ".join(f"{s['ttft_ms']:.0f} ms" for s in hurt)
    last = phases["after"][-1]
    after = f"{last['at_seconds'] - phases['stalled'][-1]['at_seconds']:.1f} s"
    whole = max(s["num_loaded"] for s in served)
    tried = [s for s in phases["stalled"] if 0 < s["num_loaded"] + s["num_failed"] < whole]
    trials = ", ".join(f"{s['ttft_ms']:.0f} ms" for s in tried)
    return [
        "## A stall",
        "",
        f"Prompts of 2,048 tokens one after another, {before:.0f} ms each from a store at "
        f"8x; then the store drops to a hundredth of that for 35 s. Computing takes {computed:.0f} "
        "ms.",
        "",
        f"- {len(hurt)} of {len(phases['stalled'])} requests took more than 1.5 times as long as "
        f"computing: {took}. The others "
        f"{statistics.median(quiet):.0f} ms.",
        f"- The store was tried {len(tried)} times with 8 blocks meanwhile; these took "
        f"{trials or 'no request'}.",
        f"- {after} after the store was as fast again, all blocks were loaded again."
        if last["num_loaded"] == whole
        else f"- {after} after the store was as fast again, not all blocks were loaded yet.",
        "",
    ]
