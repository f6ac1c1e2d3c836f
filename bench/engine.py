"""The engine with and without kvtiers: what a reload costs beside the engine's own prefix hit,
and what storing costs beside computing.

    python bench/engine.py [--out bench/results/engine.json]

Two real vLLM engines are alive at once, one with kvtiers and one without, and take turns: every
ratio is the median of ratios of neighbours. The floor of a reload is the engine's own prefix hit,
which moves no bytes and computes the same last block. For the stores, one engine computes, stores
and ends; then one engine per store, whose slab is far smaller than the prompt, finds it there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from options import at_least

from kvtiers.bench.demo import STAGING_CAPACITY, DemoPlan, engine_args
from kvtiers.bench.engine_process import EngineProcess
from kvtiers.bench.random_model import DEMO, write_random_model
from kvtiers.engines.vllm.drive import Measured, Script


@dataclass(frozen=True)
class Ratio:
    """A ratio of neighbours: median, spread (interquartile range over median), and its sides."""

    name: str
    target: float
    median: float
    spread: float
    numerator_ms: float
    denominator_ms: float
    num_pairs: int


def ratio(name: str, target: float, pairs: list[tuple[Measured, Measured]]) -> Ratio:
    values = [a.ttft_seconds / b.ttft_seconds for a, b in pairs]
    low, middle, high = statistics.quantiles(values, n=4)
    return Ratio(
        name,
        target,
        middle,
        (high - low) / middle,
        1e3 * statistics.median(a.ttft_seconds for a, _ in pairs),
        1e3 * statistics.median(b.ttft_seconds for _, b in pairs),
        len(pairs),
    )


def device() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown CPU"


def measure(num_pairs: int, num_slow_pairs: int, threads: int) -> dict[str, Any]:
    plan = DemoPlan(
        model=replace(DEMO, dtype="bfloat16"),
        num_prompt_tokens=4096,
        num_output_tokens=1,
        num_threads=threads,
    )
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, plan.model.vocab_size, plan.num_prompt_tokens).tolist()
    warm_up = rng.integers(0, plan.model.vocab_size, 64).tolist()
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(plan.model, Path(folder))
        # Everything that exists is reloaded: what is measured here is the path, not the choice.
        config = {**plan.kvtiers, "cost": {"mode": "always"}}
        scripts = [
            Script(engine_args(plan, model, kvtiers), prompt, warm_up, 1)
            for kvtiers in (None, config, {**config, "reload": {"sync_below": "1s"}})
        ]
        with (
            EngineProcess(scripts[0], threads) as plain,
            EngineProcess(scripts[1], threads) as tiered,
            EngineProcess(scripts[2], threads) as eager,
        ):
            storing = [
                (tiered.run("store", "fresh"), plain.run("compute", "drop"))
                for _ in range(num_slow_pairs)
            ]
            repeats = [
                (plain.run("compute", "drop"), plain.run("compute", "drop"))
                for _ in range(num_slow_pairs)
            ]
            eager.run("store", "fresh")
            reloads = {
                "asynchronous": [
                    (tiered.run("reload", "drop"), tiered.run("hit", "keep"))
                    for _ in range(num_pairs)
                ],
                "within the step": [
                    (eager.run("reload", "drop"), eager.run("hit", "keep"))
                    for _ in range(num_pairs)
                ],
            }
        stored = {
            kind: reload_from(kind, Path(folder), model, plan, (prompt, warm_up), num_pairs)
            for kind in ("nvme", "lmdb")
        }
    noise = ratio("computing over computing (spread of repeats)", 0.0, repeats)
    allowed = max(1.05, 1 + 1.5 * noise.spread)
    rows = [
        ratio(f"reload from DRAM, {kind}, over the engine's own prefix hit", 1.5, pairs)
        for kind, pairs in reloads.items()
    ]
    for kind, pairs in stored.items():
        name = f"reload from {kind}, asynchronous, over the engine's own prefix hit"
        rows.append(ratio(name, 2.5, pairs))
    rows.append(ratio("computing and storing over computing", allowed, storing))
    rows.append(noise)
    recompute = statistics.median(b.ttft_seconds for _, b in storing)
    reload = statistics.median(a.ttft_seconds for a, _ in reloads["asynchronous"])
    moved = sum(reloads["asynchronous"][0][0].reloaded_tokens.values())
    return {
        "device": device(),
        "date": datetime.now(UTC).date().isoformat(),
        "threads": threads,
        "prompt_tokens": plan.num_prompt_tokens,
        "block_size": plan.block_size,
        "mib_reloaded": moved * plan.model.kv_nbytes_per_token / 2**20,
        "tokens_reloaded": moved,
        "speedup_over_recompute": recompute / reload,
        "tokens_by_tier": {kind: by_tier(pairs) for kind, pairs in stored.items()},
        "ratios": [vars(row) for row in rows],
    }


def reload_from(
    kind: str,
    folder: Path,
    model: Path,
    plan: DemoPlan,
    prompts: tuple[list[int], list[int]],
    num_pairs: int,
) -> list[tuple[Measured, Measured]]:
    """Store with one engine; measure with another one that has room for little in DRAM."""

    def engine(dram: str) -> EngineProcess:
        stores = plan.with_stores(folder / f"stores-{kind}", dram, kind)
        kvtiers = {**stores, "cost": {"mode": "always"}}
        return EngineProcess(
            Script(engine_args(plan, model, kvtiers), *prompts, 1), plan.num_threads
        )

    (folder / f"stores-{kind}").mkdir()
    with engine(plan.dram_capacity) as first:
        first.run("store", "drop")
        first.settle()
    with engine(STAGING_CAPACITY) as second:
        second.run("warm", "drop")
        return [(second.run("reload", "drop"), second.run("hit", "keep")) for _ in range(num_pairs)]


def by_tier(pairs: list[tuple[Measured, Measured]]) -> dict[str, int]:
    """Return the tokens of a reload by tier: medians."""
    tiers = {tier for a, _ in pairs for tier in a.reloaded_tokens}
    return {
        tier: int(statistics.median(a.reloaded_tokens.get(tier, 0) for a, _ in pairs))
        for tier in sorted(tiers)
    }


def table(result: dict[str, Any]) -> str:
    by_tier = "; ".join(
        f"{kind}: " + ", ".join(f"{num} from {tier}" for tier, num in tokens.items())
        for kind, tokens in result["tokens_by_tier"].items()
    )
    lines = [
        "# The engine: reload, prefix hit, storing",
        "",
        f"{result['device']}, {result['date']}; vLLM on the CPU, {result['threads']} thread(s), "
        f"12 layers, hidden 1024, 8 KV heads of 64, bf16; a prompt of {result['prompt_tokens']} "
        f"tokens in blocks of {result['block_size']}. `python bench/engine.py`",
        "",
        f"A reload moves {result['mib_reloaded']:.0f} MiB ({result['tokens_reloaded']} tokens) and "
        f"is {result['speedup_over_recompute']:.0f}x faster than recompute. Ratios of neighbours "
        "in one run; the floor of a reload is the prefix hit, which moves no bytes. Behind a slab "
        f"of {STAGING_CAPACITY}, tokens by tier: {by_tier}.",
        "",
        "| ratio of times to the first token | target | median | spread | ms / ms | pairs |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["ratios"]:
        target = f"<= {row['target']:.2f}" if row["target"] else ""
        lines.append(
            f"| {row['name']} | {target} | {row['median']:.3f} | {row['spread']:.1%} | "
            f"{row['numerator_ms']:.0f} / {row['denominator_ms']:.0f} | {row['num_pairs']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write JSON here, and the table beside it")
    parser.add_argument("--pairs", type=at_least(2), default=15)
    parser.add_argument("--slow-pairs", type=at_least(2), default=7)
    parser.add_argument("--threads", type=at_least(1), default=1)
    args = parser.parse_args()
    result = measure(args.pairs, args.slow_pairs, args.threads)
    print(table(result))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
        args.out.with_suffix(".md").write_text(table(result))


if __name__ == "__main__":
    main()
