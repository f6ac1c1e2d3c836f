"""Loads within the step that computes the rest, beside both pure choices, in vLLM on the CPU."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from kvtiers.model.cost_mode import CostMode

FACTORS = (0.5, 0.71, 1.0, 1.41, 2.0)  # of the bandwidth by which a load takes what computing does
LENGTHS = (1025, 2049)
RECOMPUTE, RELOAD, SPLIT = "recompute", "reload", "split"
WAYS = (RECOMPUTE, RELOAD, SPLIT)


class Shooter(Protocol):
    """What is used of an engine of `decide`."""

    @property
    def connector(self) -> Any: ...
    def set_bandwidth(self, bytes_per_second: float) -> None: ...
    def shoot(self, num_tokens: int, mode: CostMode, documents: Sequence[int]) -> Any: ...


def split(engine: Shooter, unit: float, num_ranges: int, repeats: int) -> dict[str, Any]:
    """Measure all three ways in turn: nothing loaded; all of it, before the step; and what control
    plans where it may load within the step."""
    cells = []
    for factor in FACTORS:
        engine.set_bandwidth(factor * unit)
        for num_tokens in LENGTHS:
            seconds: dict[str, list[float]] = {way: [] for way in WAYS}
            loaded, in_step, failed = [], 0, 0
            for repeat in range(repeats):
                for way in WAYS[repeat % 3 :] + WAYS[: repeat % 3]:
                    shot = _shoot(engine, way, num_tokens, num_ranges, repeat % 8)
                    seconds[way].append(shot.ttft_seconds)
                    failed += shot.num_failed
                    if way == SPLIT:
                        loaded.append(shot.num_loaded)
                        in_step += engine.connector.decisions.finished()[-1].in_step
            better = [min(pair) for pair in zip(seconds[RECOMPUTE], seconds[RELOAD], strict=True)]
            cells.append(
                {
                    "bandwidth_factor": factor,
                    "num_tokens": num_tokens,
                    "ms": {way: 1e3 * statistics.median(seconds[way]) for way in WAYS},
                    "gain": min(statistics.median(seconds[way]) for way in WAYS[:2])
                    / statistics.median(seconds[SPLIT]),
                    "gains": [a / b for a, b in zip(better, seconds[SPLIT], strict=True)],
                    "blocks_loaded": statistics.median(loaded),
                    "in_step": in_step,
                    "repeats": repeats,
                    "blocks_failed": failed,
                }
            )
    return {"num_ranges": num_ranges, "cells": cells}


def _shoot(engine: Shooter, way: str, num_tokens: int, num_ranges: int, document: int) -> Any:
    cost = engine.connector.controller.cost
    stages = num_ranges if way == SPLIT else 1
    cost.policy = replace(cost.policy, num_load_stages=stages)
    mode = {RECOMPUTE: CostMode.NEVER, RELOAD: CostMode.ALWAYS, SPLIT: CostMode.AUTO}[way]
    return engine.shoot(num_tokens, mode, [document])


def split_table(found: dict[str, Any]) -> list[str]:
    """Return the lines of a page."""
    lines = [
        "## Loads within the step that computes the rest",
        "",
        f"`decide.py split`: {found['num_ranges']} ranges of layers, one request at a time; the "
        "three ways take turns. Bandwidth 1: the longest prompt loads as fast as it computes. "
        "Reload: all blocks, before the step. Split: what control chooses.",
        "",
        "| bandwidth | tokens | recompute ms | reload ms | split ms | gain over the better (of "
        "medians; least and most of rounds) | blocks loaded | within the step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in found["cells"]:
        ms, gains = cell["ms"], cell["gains"]
        lines.append(
            f"| {cell['bandwidth_factor']:g} | {cell['num_tokens']:,} | {ms[RECOMPUTE]:.0f} | "
            f"{ms[RELOAD]:.0f} | {ms[SPLIT]:.0f} | {cell['gain']:.2f} ({min(gains):.2f} to "
            f"{max(gains):.2f}) | {cell['blocks_loaded']:g} | {cell['in_step']} of "
            f"{cell['repeats']} |"
        )
    return [*lines, ""]
