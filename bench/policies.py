"""Token hit rates of the replacement rules: ``python bench/policies.py FOLDER [options]``.

FOLDER holds the two public traces (see the README beside them). Two ways of counting:

- *plain*: blocks alone, all of which may leave, as the published comparisons of these rules do;
- *tier*: the real `Tier`, where only tails of chains leave, and none for its own continuation.

A hit is a leading block of the prompt that is there when the request comes, 512 tokens, the last
one of a prompt what it has; the rate is hits over the tokens of all prompts, without warm-up.
Requests come in the order of their times, sessions all at once. The published table of the coding
agents does not say how it took the sessions together. If no request comes more than 330 s after its
session's one before (*coding agents, cut*; the number was fitted to the table), its LRU, Belady and
infinite columns come out within 2 %, ARC and S3-FIFO within 6 %; W-TinyLFU is 11 % above it at
6,000 blocks. ``--write`` adds the cells that were measured to ``bench/results``, a few at a time.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvtiers.control.policy import POLICIES, make_policy
from kvtiers.model.keys import BlockKey, block_key
from kvtiers.simulate.policy_curves import tier_hits
from kvtiers.simulate.trace import TraceRequest, infinite_hit_tokens, load_trace

RESULTS = Path(__file__).parent / "results"
BLOCK_SIZE = 512
TRACES = {
    "conversation": "mooncake_conversation_trace.jsonl",
    "coding agents": "coding_agent_sessions",
    "coding agents, cut": "coding_agent_sessions",
}
MOST_PAUSE_SECONDS = {"coding agents, cut": 330.0}
CAPACITIES = {
    "conversation": (1000, 2000, 3000, 4500, 6000, 9000, 12000, 24000),
    "coding agents": (1000, 2000, 3000, 6000),
    "coding agents, cut": (1000, 2000, 3000, 4500, 6000),
}
PLAIN = (*POLICIES, "belady")

Prompt = tuple[int, list[BlockKey]]  # its tokens, and its blocks


def read(path: Path, most_pause_seconds: float = math.inf) -> tuple[list[Prompt], float]:
    """Return the prompts of a trace, and the hit rate of a cache that forgets nothing."""
    requests = cut_pauses(load_trace(path, BLOCK_SIZE).requests, most_pause_seconds)
    keys: dict[int, BlockKey] = {}
    prompts = []
    for request in requests:
        for idx in request.block_ids.tolist():
            if idx not in keys:
                keys[idx] = block_key(_spread(idx), 0)
        blocks = [keys[idx] for idx in request.block_ids.tolist()]
        prompts.append((request.num_prompt_tokens, blocks))
    return prompts, infinite_hit_tokens(requests, BLOCK_SIZE).rate


def cut_pauses(requests: Sequence[TraceRequest], most_seconds: float) -> Sequence[TraceRequest]:
    """Return the requests in their order if none came later after its session's one before."""
    cut: dict[int, float] = defaultdict(float)  # by session
    before: dict[int, float] = {}
    times = []
    for request in requests:
        pause = request.arrival_seconds - before.get(request.session, 0.0)
        before[request.session] = request.arrival_seconds
        cut[request.session] += max(0.0, pause - most_seconds)
        times.append(request.arrival_seconds - cut[request.session])
    order = sorted(range(len(times)), key=times.__getitem__)
    return [requests[idx] for idx in order]


def _spread(idx: int) -> bytes:
    return (idx * 0x9E3779B97F4A7C15 % 2**128).to_bytes(16, "little")


def in_a_tier(prompts: Sequence[Prompt], name: str, capacity: int) -> Iterator[int]:
    """Yield the leading blocks of each prompt that the real tier has."""
    return tier_hits([blocks for _, blocks in prompts], name, capacity)


def plain_hits(prompts: Sequence[Prompt], name: str, capacity: int) -> Iterator[int]:
    """Yield the leading blocks of each prompt that a cache of single blocks has."""
    policy = make_policy(name, capacity)
    resident: set[BlockKey] = set()
    for _, blocks in prompts:
        yield _leading(blocks, resident)
        for key in blocks:
            if key in resident:
                policy.touched(key)
                continue
            victim = policy.next_victim() if len(resident) >= capacity else None
            if victim is not None:
                policy.removed(victim)
                resident.remove(victim)
            policy.admitted(key)
            policy.exposed(key)
            resident.add(key)


def belady_hits(prompts: Sequence[Prompt], name: str, capacity: int) -> Iterator[int]:  # noqa: ARG001
    """Yield what a cache of single blocks has that drops what is asked for latest, or never."""
    asked = [key for _, blocks in prompts for key in blocks]
    following: dict[BlockKey, int] = {}
    after = [0] * len(asked)
    for idx in range(len(asked) - 1, -1, -1):
        after[idx] = following.get(asked[idx], len(asked))
        following[asked[idx]] = idx
    resident: dict[BlockKey, int] = {}
    latest: list[tuple[int, BlockKey]] = []
    idx = 0
    for _, blocks in prompts:
        yield _leading(blocks, resident)
        for key in blocks:
            if key not in resident and len(resident) >= capacity:
                while resident.get(latest[0][1]) != -latest[0][0]:
                    heapq.heappop(latest)
                if after[idx] >= -latest[0][0]:
                    idx += 1
                    continue
                del resident[heapq.heappop(latest)[1]]
            resident[key] = after[idx]
            heapq.heappush(latest, (-after[idx], key))
            idx += 1


def _leading(blocks: Sequence[BlockKey], resident: set[BlockKey] | dict[BlockKey, int]) -> int:
    return next((n for n, key in enumerate(blocks) if key not in resident), len(blocks))


def rate(prompts: Sequence[Prompt], hits: Iterator[int]) -> float:
    """Return the share of the prompts' tokens that were hits."""
    found = sum(
        min(num_blocks * BLOCK_SIZE, num_tokens)
        for num_blocks, (num_tokens, _) in zip(hits, prompts, strict=True)
    )
    return found / sum(num_tokens for num_tokens, _ in prompts)


def page(results: dict[str, dict[str, float]]) -> str:
    """Return the results as Markdown."""
    lines = ["# Replacement rules: token hit rates", "", __doc__.split("\n\n", 1)[1].strip(), ""]
    for way, names in (("tier", POLICIES), ("plain", PLAIN)):
        lines += [f"## {way}", "", f"| trace @ blocks | {' | '.join(names)} | infinite |"]
        lines.append("|---" * (len(names) + 2) + "|")
        for cell in sorted(results, key=lambda c: (c.split(" @ ")[0], int(c.split(" @ ")[1]))):
            rates = [results[cell].get(f"{way} {name}") for name in names]
            if any(found is not None for found in rates):
                rates.append(results[cell]["infinite"])
                shown = ["" if found is None else f"{found:.4f}" for found in rates]
                lines.append(f"| {cell} | {' | '.join(shown)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Measure what was asked for, print it, and keep it with ``--write``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trace", choices=TRACES, action="append")
    parser.add_argument("--way", choices=("tier", "plain"), action="append")
    parser.add_argument("--policy", action="append", help="all of them if not given")
    parser.add_argument("--blocks", type=int, action="append", help="capacities")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    kept = RESULTS / "policies.json"
    for trace in arguments.trace or TRACES:
        prompts, infinite = read(
            arguments.folder / TRACES[trace], MOST_PAUSE_SECONDS.get(trace, math.inf)
        )
        for capacity in arguments.blocks or CAPACITIES[trace]:
            for way, names in (("tier", POLICIES), ("plain", PLAIN)):
                for name in names:
                    if way not in (arguments.way or (way,)):
                        continue
                    if name not in (arguments.policy or (name,)):
                        continue
                    hits: Callable[[Sequence[Prompt], str, int], Iterator[int]]
                    hits = in_a_tier if way == "tier" else plain_hits
                    hits = belady_hits if name == "belady" else hits
                    found = rate(prompts, hits(prompts, name, capacity))
                    print(f"{trace} @ {capacity}: {way} {name} {found:.4f}", flush=True)
                    if arguments.write:
                        _keep(kept, f"{trace} @ {capacity}", f"{way} {name}", found, infinite)


def _keep(kept: Path, cell: str, column: str, found: float, infinite: float) -> None:
    results = json.loads(kept.read_text()) if kept.exists() else {}
    row = results.setdefault(cell, {})
    row.update({column: round(found, 5), "infinite": round(infinite, 5)})
    kept.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    kept.with_suffix(".md").write_text(page(results))


if __name__ == "__main__":
    main()
