"""What the device has yet to compute of prompts that were admitted."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvtiers.control.outlook import EngineLoad
from kvtiers.cost.prefill import PrefillModel

_REMEMBERED: Final = 4096  # first tokens whose step has not ended; an engine may never tell


@dataclass(slots=True)
class _Prefill:
    """A prompt: its tokens, those that are computed or loaded, and whether its load runs."""

    num_tokens: int
    num_computed: int
    loading: bool


class Backlog:
    """Prompts from their admission to their first token.

    Steps with tokens are counted as they are scheduled, and as they end in the same order. So it
    is known at the end of which step a prompt has its first token.
    """

    def __init__(self) -> None:
        self._prefills: dict[str, _Prefill] = {}
        self._num_scheduled = 0
        self._num_ended = 0
        self._first_tokens: deque[tuple[int, str]] = deque(maxlen=_REMEMBERED)
        self._in_step: set[str] = set()
        self._waiting: set[str] = set()

    def now(self, prefill: PrefillModel) -> EngineLoad:
        """Return what the engine does at this moment."""
        return EngineLoad(
            self.seconds(prefill), computes=bool(self._in_step), num_waiting=len(self._waiting)
        )

    def arrived(self, request_id: str) -> None:
        """Note a request that waits for its admission, for the first time or once more."""
        self._waiting.add(request_id)

    def seconds(self, prefill: PrefillModel) -> float:
        """Return how long the device has work with prompts whose load is not under way."""
        waiting = [p for p in self._prefills.values() if not p.loading]
        if not waiting:
            return 0.0
        computed = np.array([p.num_computed for p in waiting])
        rest = np.array([p.num_tokens for p in waiting]) - computed
        return float(prefill.seconds(rest, computed).sum())

    def admitted(
        self, request_id: str, num_tokens: int, num_computed: int, *, loading: bool
    ) -> None:
        """Note a prompt's admission.

        Args:
            num_computed: leading tokens that need not be computed: in HBM, or to be loaded.
            loading: whether a load between steps brings some of them.
        """
        self._waiting.discard(request_id)
        # The last token is computed in any case.
        self._prefills[request_id] = _Prefill(
            num_tokens, min(num_computed, num_tokens - 1), loading
        )

    def loaded(self, request_id: str, num_lost: int) -> None:
        """Note the end of a load, and how many of its tokens did not come."""
        prefill = self._prefills.get(request_id)
        if prefill is not None:
            prefill.loading = False
            prefill.num_computed = max(0, prefill.num_computed - num_lost)

    def scheduled(self, num_computed_tokens: Mapping[str, int]) -> None:
        """Note that a step begins; request id to tokens computed once the step is done."""
        self._in_step = set(num_computed_tokens)
        self._waiting -= self._in_step  # an engine may admit without asking
        if not num_computed_tokens:
            return
        self._num_scheduled += 1
        for request_id in [i for i in self._prefills if i in num_computed_tokens]:
            prefill, num_computed = self._prefills[request_id], num_computed_tokens[request_id]
            if num_computed < prefill.num_tokens:
                prefill.num_computed = num_computed
            else:
                del self._prefills[request_id]
                self._first_tokens.append((self._num_scheduled, request_id))

    def step_ended(self) -> Sequence[str]:
        """Note the end of the oldest step that runs; returns whose first token it brought."""
        self._num_ended += 1
        first = []
        while self._first_tokens and self._first_tokens[0][0] <= self._num_ended:
            first.append(self._first_tokens.popleft()[1])
        return first

    def awaits(self, request_id: str) -> bool:
        """Whether a step that runs brings a request's first token."""
        return any(request_id == awaited for _, awaited in self._first_tokens)

    def left(self, request_id: str, *, waits_again: bool = False) -> None:
        """Forget a request: it is over, or was preempted and waits."""
        self._prefills.pop(request_id, None)
        self._in_step.discard(request_id)
        (self._waiting.add if waits_again else self._waiting.discard)(request_id)
