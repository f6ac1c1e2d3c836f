"""The result of a replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvtiers.simulate.measures import Percentiles, Timeline, TokenSums

# Of an engine that keeps up:
_LATE: Final = 16  # requests that may wait when the last one comes,
_LATE_SHARE: Final = 0.01  # or this share of all,
_LATE_LOAD: Final = 1.02  # or any number, if serving took no longer than this times the arrivals
_LONG_WAIT_SECONDS: Final = 60.0  # that one request in ten may wait


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay; times in seconds of the virtual clock, counts after the warm-up.

    Attributes:
        complete: whether every request was served, and none given up for want of time.
        interrupted: whether that is because of a KeyboardInterrupt.
        num_skipped: requests longer than the engine allows. longest: tokens that it allows.
        config: the tiers, as plain data; None without any.
        concurrency: sessions at a time, of a closed loop; None: requests came at their times.
        began_seconds: of the first measured arrival, on the clock of the timeline.
        seconds: from then to the end. arrival_seconds: to the last arrival.
        block_size: tokens of a block: prompts are hit in whole ones, never in their last token.
        num_short: requests whose prompts are too short for that. num_short_tokens: of those.
        num_late: requests that had not been admitted when the last one came.
        wait: from the arrivals to the first admissions.
        infinite_hit_rate: of a cache that forgets nothing, on the same requests, in the trace's
            blocks, the last of which may be a part.
        num_computed_tokens: by the engine, of prompts and outputs, again or for the first time.
        num_reloaded_tokens: brought from below HBM, over all admissions: recompute avoided.
        num_recomputed_tokens: computed once more after a preemption: recompute caused.
        saved_seconds: of prefill, that the hits of the first admissions spared, predicted.
        written_nbytes: store to bytes, on all its devices.
        written_nbytes_per_device_day: at that rate, on each of them.
        dropped: reason to blocks that were not offloaded, or not written back.
        failed: outcome to blocks.
        advice: what to do where the engine thrashed.
        ignored: options of the configuration that a replay does not model.
        cpu_seconds: that the replay took. num_steps: of the engine.
    """

    label: str
    title: str
    complete: bool
    interrupted: bool
    num_requests: int
    num_warmup: int
    num_skipped: int
    longest: int
    config: Mapping[str, Any] | None
    concurrency: int | None
    began_seconds: float
    seconds: float
    arrival_seconds: float
    block_size: int
    num_short: int
    num_short_tokens: int
    num_late: int
    wait: Percentiles
    ttft: Percentiles
    tpot: Percentiles
    itl: Percentiles
    e2e: Percentiles
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    requests_per_second: float
    tokens: TokenSums
    infinite_hit_rate: float
    num_computed_tokens: int
    num_reloaded_tokens: int
    num_recomputed_tokens: int
    saved_seconds: float
    num_preemptions: int
    num_swaps: int
    written_nbytes: Mapping[str, int]
    written_nbytes_per_device_day: Mapping[str, float]
    dropped: Mapping[str, int]
    failed: Mapping[str, int]
    advice: Sequence[str]
    ignored: Sequence[str]
    timeline: Timeline
    cpu_seconds: float
    num_steps: int

    @property
    def keeps_up(self) -> bool:
        """Whether requests came no faster than they were served.

        That is: nine in ten waited less than a minute, and when the last one came hardly any
        waited, or all were served within 2 % of the time.
        """
        few = self.num_late <= max(_LATE, _LATE_SHARE * self.num_requests)
        soon = (self.wait.p90 or 0.0) <= _LONG_WAIT_SECONDS
        return self.complete and soon and (few or self.load <= _LATE_LOAD)

    @property
    def load(self) -> float:
        """Time that serving took over the time in which requests came; above 1 queues only grow."""
        return self.seconds / self.arrival_seconds if self.arrival_seconds > 0 else 1.0

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        names = [name for name in self.__dataclass_fields__ if name != "timeline"]
        plain = {name: getattr(self, name) for name in names}
        for name in ("wait", "ttft", "tpot", "itl", "e2e", "tokens"):
            plain[name] = asdict(plain[name])
        plain["hit_rate"] = self.tokens.hit_rate
        plain["timeline"] = self.timeline.to_plain()
        return plain
