"""How well the modelled runner predicts engines: the same requests, side by side.

Usage: python bench/fidelity.py plain|tiers|vllm [--repeats 5] [--note disturbed]

plain: the torch runner without kvtiers. tiers: the torch runner over real tiers. vllm: real vLLM on
the CPU, without kvtiers and with it. The modelled runner's steps and links are fitted on other
requests than those that are judged. Prints TTFT and throughput of both, the error, the spread of
the repeats, which is what this machine allows, and the order of configurations. Results go to
bench/results/fidelity.*, piece by piece.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fidelity_judge import report, to_plain

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
            about = f"{piece['note']}, " if piece["note"] else ""
            parts.append(
                f"## {title}\n\n`python bench/fidelity.py {name} --repeats {piece['repeats']}`, "
                f"{piece['date']}, {about}load average {piece['load']} at the end, "
                f"{piece['seconds']} s.\n\n```\n{piece['text']}\n```\n"
            )
    return "\n".join(parts)


def main() -> None:
    """Measure one piece."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("piece", choices=["plain", "tiers", "vllm"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--note", default="", help="about the machine, such as 'disturbed'")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    began = time.monotonic()
    if args.piece == "vllm":
        from fidelity_vllm import judged  # noqa: PLC0415 - takes seconds

        cells, notes = judged(args.repeats)
    else:
        import torch  # noqa: PLC0415
        from fidelity_tiers import tiered  # noqa: PLC0415
        from fidelity_torch import plain  # noqa: PLC0415

        torch.set_num_threads(1)
        cells, notes = (plain if args.piece == "plain" else tiered)(args.repeats)
    text = f"{notes}\n{report(cells, across=args.piece == 'plain')}"
    print(f"{text}\n{time.monotonic() - began:.0f} s in all", flush=True)
    held = json.loads(args.out.read_text()) if args.out.is_file() else {}
    held[args.piece] = {
        "date": datetime.now(UTC).date().isoformat(),
        "load": round(os.getloadavg()[0], 1),
        "note": args.note,
        "repeats": args.repeats,
        "seconds": round(time.monotonic() - began),
        "text": text,
        "cells": to_plain(cells),
    }
    args.out.write_text(json.dumps(held, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(page(held))


if __name__ == "__main__":
    main()
