"""Measures recompute and reload at a series of prompt lengths, point by point."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from kvtiers.bench.lives import Lives
from kvtiers.bench.plan import DRAM, RECOMPUTE, MeasuredPlan
from kvtiers.bench.split import Split, measure_split
from kvtiers.engines.reference.one_request import Generated
from kvtiers.model.errors import KVTiersError

SPLIT: Final = "split"
_BALANCING_RUNS: Final = 3


class BenchError(KVTiersError):
    """A measurement went wrong: what was reloaded is not what was computed, or did not come."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One time to the first token.

    Attributes:
        way: `RECOMPUTE`, a tier's name, or `SPLIT`.
        num_loaded_blocks: that were reloaded. load_seconds: until they were there; 0 for a
            split, whose load and computation run at once. rest_seconds: in forward passes.
        token_id: the first token; the same for every way, or the bench stops.
    """

    way: str
    num_tokens: int
    repeat: int
    ttft_seconds: float
    num_loaded_blocks: int
    load_seconds: float
    rest_seconds: float
    token_id: int

    @property
    def key(self) -> tuple[str, int, int, int]:
        """What tells this measurement from the others of a run."""
        return self.way, self.num_tokens, self.repeat, self._blocks_of_split

    @property
    def _blocks_of_split(self) -> int:
        return self.num_loaded_blocks if self.way == SPLIT else 0


Keep = Callable[[Measured], None]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Watch:
    """Who hears of a run's progress, and when it must end.

    Attributes:
        keep: called with each new measurement, to be written down.
        progress: called with what happens next. ends_at: on `time.monotonic`.
    """

    keep: Keep
    progress: Progress
    ends_at: float

    def late(self) -> bool:
        """Whether nothing new may begin."""
        return time.monotonic() >= self.ends_at


@dataclass(frozen=True, slots=True)
class Splits:
    """Which splits are measured.

    Attributes:
        store: that is loaded from. lengths: of the prompts.
        choose: given all points so far and a length, returns how many blocks are loaded.
    """

    store: str
    lengths: Sequence[int]
    choose: Callable[[Sequence[Measured], int], int]


def num_measurements(plan: MeasuredPlan) -> int:
    """Return how many measurements `measure_ways` makes."""
    return (1 + len(plan.tiers)) * len(plan.lengths) * plan.num_repeats


def balancing_throttle(plan: MeasuredPlan) -> float:
    """Return the bytes per second at which the middle length loads as long as it computes."""
    torch.set_num_threads(plan.num_threads)
    lives = Lives(plan, Path())  # without stores, nothing is written
    with closing(lives.plain()) as plain:
        prompt = lives.document[: plan.middle_length]
        seconds = [plain.generate(prompt).ttft_seconds for _ in range(_BALANCING_RUNS)]
    num_blocks = (plan.middle_length - 1) // plan.block_size
    found = num_blocks * plan.block_nbytes / statistics.median(seconds)
    return float(f"{found:.2g}")


def measure_ways(
    plan: MeasuredPlan, folder: Path, done: list[Measured], watch: Watch
) -> list[Measured]:
    """Measure every way at every length, ways taking turns; stop when time is over.

    Args:
        folder: empty; for the stores. done: measurements of an earlier run, not made again.

    Returns:
        all measurements, those of the earlier run first.

    Raises:
        BenchError: a reload gave another token, or did not come whole.
    """
    points = list(done)
    known = {point.key for point in points}
    todo = [key for key in _keys(plan) if key not in known]
    if not todo or watch.late():
        return points
    torch.set_num_threads(plan.num_threads)
    lives = Lives(plan, folder)
    watch.progress("computing and storing the longest prompt")
    if plan.stores:
        lives.fill(plan.stores)
    with ExitStack() as stack:
        plain = stack.enter_context(closing(lives.plain()))
        in_dram = stack.enter_context(closing(lives.with_dram()))
        plain.generate(lives.document[: plan.lengths[0]])  # warm
        for way, num_tokens, repeat, _ in todo:
            if watch.late():
                break
            watch.progress(f"{way}, {num_tokens} tokens")
            prompt = lives.document[:num_tokens]
            if way == RECOMPUTE:
                result = plain.generate(prompt)
            elif way == DRAM:
                result = in_dram.generate(prompt)
                in_dram.settle()
            else:
                with closing(lives.reader(way)) as reader:
                    result = reader.generate(prompt)
                    reader.settle()
            points.append(_point(plan, way, num_tokens, repeat, result))
            _check(plan, points)
            watch.keep(points[-1])
    return points


def measure_splits(
    plan: MeasuredPlan, folder: Path, wanted: Splits, done: list[Measured], watch: Watch
) -> list[Measured]:
    """Measure loads that come layer range by layer range beside the computation of the rest.

    Both pure choices, no block loaded and all of them, are measured in turn with the split, by
    the same means; a first time before the split is chosen.

    Args:
        done: as for `measure_ways`; with it are the tokens that must come.

    Raises:
        BenchError: as `measure_ways`.
    """
    points = list(done)
    if not splits_left(plan, wanted, points) or watch.late():
        return points
    torch.set_num_threads(plan.num_threads)
    lives = Lives(plan, folder)
    watch.progress("computing and storing layer ranges")
    lives.fill([wanted.store], plan.num_stages)
    with closing(lives.plain()) as plain:
        plain.generate(lives.document[: plan.lengths[0]])  # warm
    for repeat, split in _splits(plan, wanted, points):
        if watch.late():
            break
        if _is_measured(split, repeat, points):
            continue
        watch.progress(f"split, {split.num_tokens} tokens, {split.num_blocks} blocks loaded")
        prompt = lives.document[: split.num_tokens]
        with closing(lives.reader(wanted.store, plan.num_stages)) as reader:
            seconds, token = measure_split(reader, prompt, split)
        loaded = split.num_blocks
        points.append(
            Measured(SPLIT, split.num_tokens, repeat, seconds, loaded, 0.0, seconds, token)
        )
        _check(plan, points)
        watch.keep(points[-1])
    return points


def splits_left(plan: MeasuredPlan, wanted: Splits, points: list[Measured]) -> bool:
    """Return whether a split is still to be measured."""
    return not all(
        _is_measured(split, repeat, points) for repeat, split in _splits(plan, wanted, points)
    )


def _is_measured(split: Split, repeat: int, points: Sequence[Measured]) -> bool:
    key = SPLIT, split.num_tokens, repeat, split.num_blocks
    return any(point.key == key for point in points)


def _splits(
    plan: MeasuredPlan, wanted: Splits, points: list[Measured]
) -> Iterator[tuple[int, Split]]:
    """Yield repeats and splits; `points` grows meanwhile."""
    pure: dict[int, tuple[int, ...]] = {n: (0, (n - 1) // plan.block_size) for n in wanted.lengths}
    for num_tokens, numbers in pure.items():
        yield from ((0, Split(num_tokens, num)) for num in numbers)
    chosen = {n: (*numbers, wanted.choose(points, n)) for n, numbers in pure.items()}
    for repeat in range(plan.num_repeats):
        for num_tokens, numbers in chosen.items():
            yield from ((repeat, Split(num_tokens, num)) for num in numbers)


def _keys(plan: MeasuredPlan) -> Iterator[tuple[str, int, int, int]]:
    for repeat in range(plan.num_repeats):
        for num_tokens in plan.lengths:
            for way in (RECOMPUTE, *plan.tiers):
                yield way, num_tokens, repeat, 0


def _point(
    plan: MeasuredPlan, way: str, num_tokens: int, repeat: int, result: Generated
) -> Measured:
    return Measured(
        way=way,
        num_tokens=num_tokens,
        repeat=repeat,
        ttft_seconds=result.ttft_seconds,
        num_loaded_blocks=result.num_reloaded_tokens // plan.block_size,
        load_seconds=result.load_seconds,
        rest_seconds=sum(step.seconds for step in result.steps),
        token_id=result.token_ids[0],
    )


def _check(plan: MeasuredPlan, points: list[Measured]) -> None:
    """Refuse a measurement of something else than it says."""
    last = points[-1]
    most = (last.num_tokens - 1) // plan.block_size
    if last.way not in (RECOMPUTE, SPLIT) and last.num_loaded_blocks != most:
        raise BenchError(
            f"{last.way}: {last.num_loaded_blocks} of {most} blocks of a prompt of "
            f"{last.num_tokens} tokens were reloaded; the rest did not come"
        )
    expected = next(point for point in points if point.num_tokens == last.num_tokens).token_id
    if last.token_id != expected:
        raise BenchError(
            f"{last.way}: a prompt of {last.num_tokens} tokens gave token {last.token_id} with "
            f"{last.num_loaded_blocks} blocks reloaded, {expected} when it was computed"
        )
