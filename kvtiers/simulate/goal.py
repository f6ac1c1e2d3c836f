"""What tiers are to achieve, and what they may cost."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvtiers.model.errors import ConfigError
from kvtiers.model.units import parse_duration

_EXAMPLES: Final = "write ttft-p90=0.5x, ttft-p90=2s, hit-rate=0.3 or cost=500"


class GoalKind(StrEnum):
    """What is to be reached."""

    TTFT = "ttft-p90"  # at most so many seconds, or a share of what it is without tiers
    HIT_RATE = "hit-rate"  # at least this share of the prompt tokens
    COST = "cost"  # the lowest p90 TTFT that so much money buys


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal.

    Attributes:
        value: seconds, a share, or money.
        relative: whether a TTFT is meant as a share of that without tiers.
    """

    kind: GoalKind
    value: float
    relative: bool = False

    @classmethod
    def parse(cls, text: str) -> Goal:
        """Return the goal that a text such as ``ttft-p90=0.5x`` means.

        Raises:
            ConfigError: it means none; the message says what would.
        """
        name, equals, value = text.partition("=")
        if not equals or name not in list(GoalKind):
            raise ConfigError(f"--goal: {text!r} is no goal; {_EXAMPLES}")
        kind = GoalKind(name)
        share = re.fullmatch(r"(\d*\.?\d+)x", value)
        if kind is GoalKind.TTFT and share:
            return cls(kind, _between(text, float(share.group(1)), 1.0), relative=True)
        if kind is GoalKind.TTFT:
            try:
                return cls(kind, _between(text, parse_duration(value), float("inf")))
            except ValueError as error:
                raise ConfigError(f"--goal: {text!r}: {error}; {_EXAMPLES}") from error
        if not re.fullmatch(r"\d*\.?\d+", value):
            raise ConfigError(f"--goal: {text!r}: {value!r} is no number; {_EXAMPLES}")
        most = 1.0 if kind is GoalKind.HIT_RATE else float("inf")
        return cls(kind, _between(text, float(value), most))

    def met(self, ttft_p90: float | None, hit_rate: float, before: float | None) -> bool:
        """Whether a replay reaches the goal; one of cost is not about replays, and always is.

        Args:
            before: p90 TTFT without tiers, for a relative goal; None: not known.
        """
        if self.kind is GoalKind.HIT_RATE:
            return hit_rate >= self.value
        if self.kind is GoalKind.COST:
            return True
        limit = self.limit_seconds(before)
        return ttft_p90 is not None and limit is not None and ttft_p90 <= limit

    def limit_seconds(self, before: float | None) -> float | None:
        """Return the p90 TTFT that it allows; None where it is not about time, or unknown."""
        if self.kind is not GoalKind.TTFT:
            return None
        if not self.relative:
            return self.value
        return None if before is None else self.value * before

    def __str__(self) -> str:
        if self.kind is GoalKind.TTFT:
            much = f"{self.value:g} of that without tiers" if self.relative else f"{self.value:g} s"
            return f"p90 TTFT of at most {much}"
        if self.kind is GoalKind.HIT_RATE:
            return f"hit rate of at least {100 * self.value:.4g}%"
        return f"lowest p90 TTFT for a price of at most {self.value:g}"


@dataclass(frozen=True, slots=True)
class Prices:
    """Money for a GB (10**9 bytes); only their ratio matters, but for a goal of cost."""

    dram: float = 4.0
    nvme: float = 0.1

    def of(self, dram_nbytes: float, nvme_nbytes: float) -> float:
        """Return what tiers cost."""
        return (dram_nbytes * self.dram + nvme_nbytes * self.nvme) / 1e9


def _between(text: str, value: float, most: float) -> float:
    if not 0 < value <= most or value == float("inf"):
        bound = "" if most == float("inf") else f" and at most {most:g}"
        raise ConfigError(f"--goal: {text!r}: must be above 0{bound}; {_EXAMPLES}")
    return value
