"""How long the deciding plane takes: ``python bench/control.py [--write]``.

Nothing is copied here. The ceilings are the project's own targets: 15 ms for the first match and
plan of an 8,192-block prompt over an index of a million blocks, 0.2 ms for asking again, 1 ms a
step with 256 running requests. ``--write`` puts the figures into ``bench/results``.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from control_world import (
    BLOCK_SIZE,
    PROMPT_BLOCKS,
    DecodingEngine,
    connect,
    fill_index,
    hashes_of,
)

RESULTS = Path(__file__).parent / "results"
INDEX_BLOCKS = 122 * PROMPT_BLOCKS  # 999,424
NUM_RUNNING = 256


@dataclass(frozen=True)
class Result:
    """One line of the table; milliseconds. The best is what the code needs on a quiet machine."""

    what: str
    best_ms: float
    median_ms: float
    ceiling_ms: float
    num_samples: int


@dataclass(frozen=True)
class Pauses:
    """What many steps took, answers included, over a full index; milliseconds.

    Attributes:
        p999_ms: the time that one step of a thousand exceeds.
        num_full_collections: by themselves. num_objects: that the collector tracks.
        full_collection_ms: of one that was asked for in the end.
    """

    num_steps: int
    median_ms: float
    p999_ms: float
    worst_ms: float
    num_full_collections: int
    num_objects: int
    full_collection_ms: float


def measure(what: str, ceiling_ms: float, samples: Callable[[int], float], num: int) -> Result:
    """Time `samples` that time themselves, without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        times = [samples(i) * 1e3 for i in range(num)]
    finally:
        gc.enable()
    return Result(what, min(times), statistics.median(times), ceiling_ms, num)


def timed(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def lookups(num_samples: int = 20) -> list[Result]:
    """Measure questions about a prompt that DRAM holds as a whole."""
    connector = connect(INDEX_BLOCKS + 1024)
    fill_index(connector, INDEX_BLOCKS)
    prompts = [hashes_of(i, PROMPT_BLOCKS) for i in range(num_samples)]
    num_tokens = PROMPT_BLOCKS * BLOCK_SIZE + 1

    def ask(i: int) -> float:
        return timed(lambda: connector.reloadable(str(i), prompts[i], num_tokens, 0))

    def plan_anew(i: int) -> float:
        connector.controller.preempted(str(i))  # the keys stay, the answer goes
        return ask(i)

    first = measure("first question, keys derived too", 15, ask, num_samples)
    again = measure("the same question again", 0.2, ask, num_samples)
    plan = measure("match and plan, keys known", 15, plan_anew, num_samples)
    return [first, plan, again]


def steps(num_samples: int = 30) -> list[Result]:
    """Measure steps in which every running request decodes."""
    engine = DecodingEngine(connect(64 * 1024), NUM_RUNNING, num_blocks=128)
    results = []
    for num, what in ((NUM_RUNNING // BLOCK_SIZE, "1 of 32"), (NUM_RUNNING, "all")):
        answers: list[float] = []

        def step(_: int, num: int = num, answers: list[float] = answers) -> float:
            coming = engine.advance(num)
            started = time.perf_counter()
            orders = engine.connector.schedule(coming)
            seconds = time.perf_counter() - started
            answers.append(timed(lambda: engine.answer(orders)))
            return seconds

        name = f"step of {NUM_RUNNING} requests, {what} completing a block"
        results.append(measure(name, 1, step, num_samples))
        ms = [seconds * 1e3 for seconds in answers]
        results.append(
            Result(f"answers of that step, {what}", min(ms), statistics.median(ms), 1, num_samples)
        )
    return results


def pauses(num_steps: int = 20_000) -> Pauses:
    """Time steps over a full index, one after another, with the garbage collector at work."""
    connector = connect(INDEX_BLOCKS)
    fill_index(connector, INDEX_BLOCKS)
    num_completing = NUM_RUNNING // BLOCK_SIZE
    num_more = num_steps * num_completing // NUM_RUNNING + 1
    engine = DecodingEngine(connector, NUM_RUNNING, num_blocks=128, num_more=num_more)
    began, collections = 0.0, []

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.perf_counter()
        elif info["generation"] == 2:
            collections.append((time.perf_counter() - began) * 1e3)

    times = []
    gc.callbacks.append(note)
    try:
        for idx in range(num_steps):
            coming = engine.advance(num_completing, first=idx * num_completing)
            times.append(1e3 * timed(lambda: engine.answer(connector.schedule(coming))))  # noqa: B023
        num_by_itself, num_objects = len(collections), len(gc.get_objects())
        gc.collect()
    finally:
        gc.callbacks.remove(note)
    times.sort()
    return Pauses(
        num_steps,
        statistics.median(times),
        times[-1 - num_steps // 1000],
        times[-1],
        num_by_itself,
        num_objects,
        collections[-1],
    )


def machine() -> dict[str, object]:
    """Say on what this ran."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "device": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "load": round(os.getloadavg()[0], 1),
    }


def page(facts: dict[str, object], results: list[Result], paused: Pauses) -> str:
    """Return the results as Markdown."""
    lines = [
        "# Control plane",
        "",
        f"`python bench/control.py` on {facts['device']}, {facts['cores']} cores, Python "
        f"{facts['python']}, {facts['date']}; load average {facts['load']} from other processes. "
        f"Index of {INDEX_BLOCKS:,} blocks, prompt of {PROMPT_BLOCKS:,}; nothing is copied. "
        "Milliseconds.",
        "",
        "| what | best | median | ceiling |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {r.what} | {r.best_ms:.3f} | {r.median_ms:.3f} | {r.ceiling_ms:g} |" for r in results
    ]
    lines += [
        "",
        "## Garbage collector",
        "",
        "The table is measured without it. With it, over the full index, each offload evicting a "
        f"block, {paused.num_steps:,} steps of {NUM_RUNNING} requests, 1 of 32 completing a block, "
        f"answers included: median {paused.median_ms:.2f} ms, one of a thousand over "
        f"{paused.p999_ms:.2f} ms, worst {paused.worst_ms:.1f} ms; full collections among them: "
        f"{paused.num_full_collections}. One that was asked for at the end took "
        f"{paused.full_collection_ms:.0f} ms with {paused.num_objects:,} tracked objects, of which "
        "the blocks of the index are none: only the tables that lead to them are gone through. "
        "Python runs one by itself when the objects that survived since the last one are a quarter "
        "of all.",
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write bench/results/control.*")
    write = parser.parse_args().write
    facts = machine()
    results = [*lookups(), *steps()]
    paused = pauses()
    text = page(facts, results, paused)
    print(text)
    if write:
        RESULTS.mkdir(exist_ok=True)
        rows = [asdict(result) for result in results]
        data = {**facts, "results": rows, "garbage_collector": asdict(paused)}
        (RESULTS / "control.json").write_text(json.dumps(data, indent=2) + "\n")
        (RESULTS / "control.md").write_text(text)


if __name__ == "__main__":
    main()
