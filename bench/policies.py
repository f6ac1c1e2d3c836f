"""Token hit rates of the replacement rules: ``python bench/policies.py FOLDER [options]``.

FOLDER holds the two public traces (see the README beside them). Two ways of counting:

- *plain*: blocks alone, all of which may leave, as the published comparisons of these rules do;
- *tier*: the real `Tier`, where only tails of chains leave, and none for its own continuation.

A hit is a leading block of the prompt that is there when the request comes, 512 tokens, the last
one of a prompt what it has; the rate is hits over the tokens of all prompts, without warm-up.
Requests come in the order of their times, sessions all at once. ``--write`` adds the cells that
were measured to ``bench/results``, a few at a time.

No reading of the 35 sessions gives the published row of the coding agents (LRU .317 and .883 at
1,000 and 6,000 blocks, W-TinyLFU .748 at 6,000, infinite .952). They hold .935; .941 at most, or
.950 if sessions share their tools and answers are kept as well. In none of 35 orders in which LRU
has .88 at 6,000 blocks has W-TinyLFU less than .82. So the row seems to be of more sessions. With
66 (*more agents*: drawn from those of 15 requests or more, five seeds) all columns come out within
6 % in the mean of the seeds, but S3-FIFO at 1,000, 9 % above. If no request comes more than 330 s
after its session's one before (*coding agents, cut*; the number was fitted), LRU, Belady and
infinite come out within 2 %, ARC and S3-FIFO within 6 %, and W-TinyLFU 11 % above at 6,000 blocks.

``--held-out`` takes the traces of `policy_traces` instead, of which no rule was made on those in
`UNSEEN`, ``--lookalikes`` those of `policy_lookalikes`. The parameters of `adaptive` were chosen by
cells of the others, at 100 to 3,000 blocks, and of the public traces; how it guesses chains, in the
plain way, by ten cells at 1,000 to 2,000 blocks, and of the public traces. The plain cells of
`UNSEEN` of 1,000 blocks or more were measured twice while that was made, and nothing was chosen by
them.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from policy_lookalikes import LOOKALIKES
from policy_traces import HELD_OUT, held_out

from kvtiers.control.policy import POLICIES, make_policy
from kvtiers.control.policy.adaptive import RULES
from kvtiers.model.keys import BlockKey
from kvtiers.simulate.policy_curves import hit_rate, prompt_keys, tier_hits
from kvtiers.simulate.trace import Trace, TraceRequest, infinite_hit_tokens, load_trace

RESULTS = Path(__file__).parent / "results"
BLOCK_SIZE = 512
TRACES = {
    "conversation": "mooncake_conversation_trace.jsonl",
    "coding agents": "coding_agent_sessions",
    "coding agents, cut": "coding_agent_sessions",
}
MOST_PAUSE_SECONDS = {"coding agents, cut": 330.0}
CAPACITIES = {
    **{f"more agents, {seed}": (1000, 6000) for seed in range(5)},
    "conversation": (1000, 2000, 3000, 4500, 6000, 9000, 12000, 24000),
    "coding agents": (1000, 2000, 3000, 6000),
    "coding agents, cut": (1000, 2000, 3000, 4500, 6000),
}
HELD_OUT_CAPACITIES = (100, 500, 2000, 8000)
LOOKALIKE_CAPACITIES = (500, 1000, 3000, 6000, 12000)
# Traces of `HELD_OUT` and `LOOKALIKES` that were measured, but not looked at before the end.
UNSEEN = frozenset(
    {
        "first half of the hour",
        "odd agents",
        "agents one by one",
        "chat, then agents",
        "synthetic chat",
        "bursts",
        "short and long",
        "documents, then others",
        "chat, documents, agents",
        "stable popularity",
        "drifting popularity",
        "tool calls of many agents",
        "long documents, more questions",
        "agent sessions, shared prompts",
        *(f"more agents, {seed}" for seed in range(5)),
    }
)
PLAIN = (*POLICIES, "belady")

Prompt = list[BlockKey]


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


def plain_hits(prompts: Sequence[Prompt], name: str, capacity: int) -> Iterator[int]:
    """Yield the leading blocks of each prompt that a cache of single blocks has."""
    policy = make_policy(name, capacity)
    resident: set[BlockKey] = set()
    for blocks in prompts:
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
    asked = [key for blocks in prompts for key in blocks]
    following: dict[BlockKey, int] = {}
    after = [0] * len(asked)
    for idx in range(len(asked) - 1, -1, -1):
        after[idx] = following.get(asked[idx], len(asked))
        following[asked[idx]] = idx
    resident: dict[BlockKey, int] = {}
    latest: list[tuple[int, BlockKey]] = []
    idx = 0
    for blocks in prompts:
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


def trace_of(folder: Path, name: str) -> Trace:
    """Return a trace by its name in `TRACES`, `HELD_OUT` or `LOOKALIKES`."""
    if name in LOOKALIKES:
        return Trace(name, BLOCK_SIZE, tuple(LOOKALIKES[name]()))
    if name in HELD_OUT:
        return held_out(folder, name)
    trace = load_trace(folder / TRACES[name], BLOCK_SIZE)
    most_pause = MOST_PAUSE_SECONDS.get(name, math.inf)
    return replace(trace, requests=tuple(cut_pauses(trace.requests, most_pause)))


def page(results: dict[str, dict[str, float]]) -> str:
    """Return the results as Markdown."""
    lines = ["# Replacement rules: token hit rates", "", __doc__.split("\n\n", 1)[1].strip(), ""]
    for way, names in (("tier", POLICIES), ("plain", PLAIN)):
        seen = [name for name in (*HELD_OUT, *LOOKALIKES) if name not in UNSEEN]
        for title, traces in (
            (way, list(TRACES)),
            (f"{way}, others that were looked at", seen),
            (f"{way}, not looked at before the end", list(UNSEEN)),
        ):
            cells = [cell for cell in results if cell.split(" @ ")[0] in traces]
            lines += _table(title, {cell: results[cell] for cell in cells}, way, names)
    return "\n".join(lines)


def _table(
    title: str, results: dict[str, dict[str, float]], way: str, names: Sequence[str]
) -> list[str]:
    columns = [*names, "infinite", "adaptive / best fixed"]
    lines = [f"## {title}", "", f"| trace @ blocks | {' | '.join(columns)} |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for cell in sorted(results, key=lambda c: (c.split(" @ ")[0], int(c.split(" @ ")[1]))):
        rates = [results[cell].get(f"{way} {name}") for name in names]
        if all(found is None for found in rates):
            continue
        fixed = [results[cell].get(f"{way} {name}") for name in RULES]
        adaptive = results[cell].get(f"{way} adaptive")
        rates.append(results[cell]["infinite"])
        shown = ["" if found is None else f"{found:.4f}" for found in rates]
        whole = [found for found in fixed if found is not None]
        told = adaptive is not None and len(whole) == len(fixed) and max(whole) > 0
        shown.append(f"{(adaptive or 0.0) / max(whole):.3f}" if told else "")
        lines.append(f"| {cell} | {' | '.join(shown)} |")
    return [*lines, ""]


def main() -> None:
    """Measure what was asked for, print it, and keep it with ``--write``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trace", choices=[*TRACES, *HELD_OUT, *LOOKALIKES], action="append")
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--lookalikes", action="store_true")
    parser.add_argument("--way", choices=("tier", "plain"), action="append")
    parser.add_argument("--policy", action="append", help="all of them if not given")
    parser.add_argument("--blocks", type=int, action="append", help="capacities")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--new", action="store_true", help="only cells that were not kept yet")
    arguments = parser.parse_args()
    if not all((arguments.folder / name).exists() for name in TRACES.values()):
        parser.error(f"{arguments.folder} lacks one of {', '.join(sorted(set(TRACES.values())))}")
    kept = RESULTS / "policies.json"
    group = HELD_OUT if arguments.held_out else LOOKALIKES if arguments.lookalikes else TRACES
    for name_of_trace in arguments.trace or group:
        trace = trace_of(arguments.folder, name_of_trace)
        prompts, infinite = prompt_keys(trace), infinite_hit_tokens(trace.requests, BLOCK_SIZE).rate
        usual = LOOKALIKE_CAPACITIES if name_of_trace in LOOKALIKES else HELD_OUT_CAPACITIES
        for capacity in arguments.blocks or CAPACITIES.get(name_of_trace, usual):
            cell = f"{name_of_trace} @ {capacity}"
            for way, names in (("tier", POLICIES), ("plain", PLAIN)):
                for name in names:
                    if way not in (arguments.way or (way,)):
                        continue
                    if name not in (arguments.policy or (name,)):
                        continue
                    if arguments.new and f"{way} {name}" in _kept(kept).get(cell, {}):
                        continue
                    hits: Callable[[Sequence[Prompt], str, int], Iterator[int]]
                    hits = tier_hits if way == "tier" else plain_hits
                    hits = belady_hits if name == "belady" else hits
                    found = hit_rate(trace, hits(prompts, name, capacity))
                    print(f"{cell}: {way} {name} {found:.4f}", flush=True)
                    if arguments.write:
                        _keep(kept, cell, f"{way} {name}", found, infinite)


def _kept(path: Path) -> dict[str, dict[str, float]]:
    return json.loads(path.read_text()) if path.exists() else {}


def _keep(kept: Path, cell: str, column: str, found: float, infinite: float) -> None:
    results = _kept(kept)
    row = results.setdefault(cell, {})
    row.update({column: round(found, 5), "infinite": round(infinite, 5)})
    kept.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    kept.with_suffix(".md").write_text(page(results))


if __name__ == "__main__":
    main()
