"""What is read off a replay: percentiles, sums, and how things stood over time."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

HBM: Final = "hbm"
_MOST_SAMPLES: Final = 800


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of a number of values, in seconds; None where there is none.

    Attributes:
        num: of values.
    """

    num: int = 0
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    most: float | None = None

    @classmethod
    def of(cls, values: Sequence[float] | array[float]) -> Percentiles:
        """Return those of values."""
        if not len(values):
            return cls()
        found = np.asarray(values, dtype=np.float64)
        p50, p90, p95, p99 = np.percentile(found, (50, 90, 95, 99)).tolist()
        return cls(len(found), float(found.mean()), p50, p90, p95, p99, float(found.max()))


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
    """How an engine stood at some times, evenly apart.

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
