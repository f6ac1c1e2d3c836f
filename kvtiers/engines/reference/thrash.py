"""Detects that an engine thrashes by preempting, and says what helps."""

from __future__ import annotations

from collections import deque
from typing import Final

_WINDOW_STEPS: Final = 64  # of a second or two of decoding; less would call a burst a state
_FULL: Final = 0.75  # victims leave room behind, so that use is seldom 1 while it thrashes
_WASTE: Final = 0.1  # share of the computed tokens; decodes alone cannot explain it

_LOWER_TIER: Final = "give the blocks a lower tier: kvtiers with preemption cost or swap"
ADVICE: Final = (
    "admit less: lower max_num_seqs",
    "cap the context: lower max_model_len",
    "add capacity: an fp8 KV cache, tensor parallelism, a bigger pool",
    _LOWER_TIER,
    "scale out: another replica",
)


class ThrashDetector:
    """Looks back over the last 64 steps for what preemptions cost.

    An engine thrashes while its KV is nearly full, requests are preempted, others wait, and more
    than a tenth of what it computes had been computed before.
    """

    def __init__(self, *, has_tiers: bool) -> None:
        self._advice = tuple(a for a in ADVICE if not has_tiers or a != _LOWER_TIER)
        self._steps: deque[tuple[float, int, int, int, int]] = deque(maxlen=_WINDOW_STEPS)
        self._sums = [0.0, 0, 0, 0, 0]

    def see(
        self,
        kv_use: float,
        num_preempted: int,
        num_waiting: int,
        num_tokens: int,
        num_again: int,
    ) -> None:
        """Take in a step.

        Args:
            kv_use: share of blocks held. num_waiting: requests that are not running.
            num_tokens: computed. num_again: of those, computed before a preemption.
        """
        row = (kv_use, num_preempted, num_waiting > 0, num_tokens, num_again)
        if len(self._steps) == _WINDOW_STEPS:
            self._sums = [s - old for s, old in zip(self._sums, self._steps[0], strict=True)]
        self._steps.append(row)
        self._sums = [s + new for s, new in zip(self._sums, row, strict=True)]

    @property
    def thrashes(self) -> bool:
        """Whether preemption eats the throughput."""
        num = len(self._steps)
        kv_use, num_preempted, num_waiting, num_tokens, num_again = self._sums
        return (
            num == _WINDOW_STEPS
            and kv_use >= _FULL * num
            and num_preempted >= 2
            and num_waiting >= num / 2
            and num_again > _WASTE * num_tokens
        )

    @property
    def advice(self) -> tuple[str, ...]:
        """What helps, best first; empty while nothing is wrong."""
        return self._advice if self.thrashes else ()
