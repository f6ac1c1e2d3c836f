"""What is measured in a replay: percentiles, sums of tokens, and a timeline."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

HBM: Final = "hbm"
_MOST_SAMPLES: Final = 800
_MARKS: Final = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Mean and percentiles of some times, in seconds; None where there are no values.

    Attributes:
        num: of values. most: the largest.
    """

    num: int = 0
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    most: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """Return the percentiles of some values."""
        if not len(values):
            return cls()
        found = np.asarray(values, dtype=np.float64)
        p50, p90, p95, p99 = np.percentile(found, _MARKS).tolist()
        return cls(len(found), float(found.mean()), p50, p90, p95, p99, float(found.max()))


class RunLengths:
    """Very many values in run-length encoding: equal ones in a row are kept once, with a count.

    Most sequences of a step have waited equally long for their token, so that the times of tens
    of millions of tokens take little memory.
    """

    def __init__(self) -> None:
        self._values, self._counts = array("d"), array("L")

    @property
    def num_kept(self) -> int:
        """Runs that are kept."""
        return len(self._values)

    def extend(self, values: Sequence[float]) -> None:
        """Add the values of a step, in any order."""
        num = len(values)
        if num and values.count(values[0]) < num:
            values = sorted(values)
        at = 0
        while at < num:
            again = bisect_right(values, values[at]) - at
            self._values.append(values[at])
            self._counts.append(again)
            at += again

    def percentiles(self) -> Percentiles:
        """Return the percentiles of all values."""
        if not self._values:
            return Percentiles()
        order = np.argsort(self._values)
        values = np.asarray(self._values, dtype=np.float64)[order]
        counts = np.asarray(self._counts, dtype=np.int64)[order]
        ends = np.cumsum(counts)
        num = int(ends[-1])
        places = np.array(_MARKS) / 100 * (num - 1)
        before = np.floor(places).astype(np.int64)
        low, high = (
            values[np.searchsorted(ends, place, side="right")]
            for place in (before, np.minimum(before + 1, num - 1))
        )
        p50, p90, p95, p99 = (low + (high - low) * (places - before)).tolist()
        return Percentiles(num, float(values @ counts) / num, p50, p90, p95, p99, float(values[-1]))


@dataclass(frozen=True, slots=True)
class TokenSums:
    """Where the KV of prompts came from, at the first admission of each request.

    Attributes:
        hits: tier to tokens, HBM first.
        computed: the rest: ``sum(hits) + computed == prompt``, exactly.
    """

    prompt: int
    output: int
    hits: Mapping[str, int]
    computed: int

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were hits, of any tier."""
        return sum(self.hits.values()) / self.prompt if self.prompt else 0.0


@dataclass(slots=True)
class Timeline:
    """The state of an engine at evenly spaced times, at most 800 of them.

    Attributes:
        seconds: of the virtual clock. kv_use: share of HBM's blocks that requests hold.
        tiers: tier to the share of its capacity that is in use.
    """

    seconds: list[float] = field(default_factory=list)
    kv_use: list[float] = field(default_factory=list)
    num_running: list[int] = field(default_factory=list)
    num_waiting: list[int] = field(default_factory=list)
    num_swapped: list[int] = field(default_factory=list)
    tiers: dict[str, list[float]] = field(default_factory=dict)
    _apart: float = 0.0
    _next: float = 0.0

    def due(self, now: float) -> bool:
        """Whether it is time for another sample."""
        return now >= self._next

    def add(
        self, now: float, kv_use: float, queues: tuple[int, int, int], tiers: Mapping[str, float]
    ) -> None:
        """Take a sample; `queues`: running, waiting, swapped."""
        self.seconds.append(now)
        self.kv_use.append(kv_use)
        for column, value in zip(
            (self.num_running, self.num_waiting, self.num_swapped), queues, strict=True
        ):
            column.append(value)
        for name, use in tiers.items():
            self.tiers.setdefault(name, []).append(use)
        if len(self.seconds) >= _MOST_SAMPLES:
            self._thin()
        self._next = now + self._apart

    def to_plain(self) -> dict[str, object]:
        """Return plain data for JSON."""
        names = ("seconds", "kv_use", "num_running", "num_waiting", "num_swapped", "tiers")
        return {name: getattr(self, name) for name in names}

    def _thin(self) -> None:
        """Keep every second sample, and take half as many from now on."""
        span = self.seconds[-1] - self.seconds[0]
        self._apart = max(2 * self._apart, 2 * span / _MOST_SAMPLES)
        for shares in (self.seconds, self.kv_use, *self.tiers.values()):
            del shares[1::2]
        for counts in (self.num_running, self.num_waiting, self.num_swapped):
            del counts[1::2]
