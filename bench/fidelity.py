"""How well the modelled runner predicts engines: the same requests, side by side.

Usage: python bench/fidelity.py plain|tiers|vllm [--repeats 5] [--keep FILE] [--note disturbed]

plain: the torch runner without kvtiers. tiers: the torch runner over real tiers. vllm: real vLLM on
the CPU, without kvtiers and with it. The modelled runner's steps and links are fitted on other
requests than those that are judged. Prints TTFT and throughput of both, the error, the spread of
the repeats, which is what this machine allows, and the order of configurations. Results go to
bench/results/fidelity.*, piece by piece. Repeats that are kept in a file are added to by the next
call, so that a quiet machine is needed for some minutes at a time only.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fidelity_judge import Cell, report, to_plain
from options import at_least

RESULTS = Path(__file__).parent / "results" / "fidelity.json"


TITLES = {
    "plain": "The torch runner without kvtiers",
    "tiers": "The torch runner over real tiers",
    "vllm": "vLLM on the CPU, a small trace of chats",
}


def page(held: Mapping[str, Any]) -> str:
    """Return all pieces that were measured, as Markdown."""
    parts = ["# The modelled runner against engines that really run\n"]
    for name, title in TITLES.items():
        if name in held:
            piece = held[name]
            about = f", {piece['note']}" if piece["note"] else ""
            parts.append(
                f"## {title}\n\n`python bench/fidelity.py {name} --repeats {piece['repeats']}`, "
                f"{piece['date']}{about}.\n\n```\n{piece['text']}\n```\n"
            )
    return "\n".join(parts)


def piece_of(name: str) -> tuple[Callable[[], Any], Callable[[Any], tuple[list[Cell], str]]]:
    """Return what measures a piece once, as plain data, and what judges all of that."""
    if name == "vllm":
        from fidelity_vllm import judge_vllm, measure_vllm  # noqa: PLC0415 - takes seconds

        return measure_vllm, judge_vllm
    import torch  # noqa: PLC0415
    from fidelity_tiers import judge_tiers, measure_tiers  # noqa: PLC0415
    from fidelity_torch import judge_plain, measure_plain  # noqa: PLC0415

    torch.set_num_threads(1)
    return (measure_plain, judge_plain) if name == "plain" else (measure_tiers, judge_tiers)


def main() -> None:
    """Measure one piece, and judge it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("piece", choices=["plain", "tiers", "vllm"])
    parser.add_argument("--repeats", type=at_least(1), default=5, help="to add to those in --keep")
    parser.add_argument("--keep", type=Path, help="file of measurements, to go on later")
    parser.add_argument("--note", default="", help="about the machine, such as 'disturbed'")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    measure, judge = piece_of(args.piece)
    raws = json.loads(args.keep.read_text()) if args.keep and args.keep.is_file() else []
    for _ in range(args.repeats):
        began = time.monotonic()
        raws.append(measure())
        print(f"repeat {len(raws)}: {time.monotonic() - began:.0f} s", flush=True)
        if args.keep:
            args.keep.write_text(json.dumps(raws))
    cells, notes = judge(raws)
    text = f"{notes}\n{report(cells, across=args.piece == 'plain')}"
    print(text, flush=True)
    held = json.loads(args.out.read_text()) if args.out.is_file() else {}
    held[args.piece] = {
        "date": datetime.now(UTC).date().isoformat(),
        "note": args.note,
        "repeats": len(raws),
        "text": text,
        "cells": to_plain(cells),
    }
    args.out.write_text(json.dumps(held, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(page(held))


if __name__ == "__main__":
    main()
