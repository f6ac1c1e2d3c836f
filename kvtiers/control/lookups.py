"""What stores are asked about their indexes, and for how long an answer is waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from kvtiers.model.keys import BlockKey, pack_keys, unpack_keys
from kvtiers.model.messages import Lookup, Presence

MAX_OWED: Final = 1 << 18  # keys that one store may owe answers for: some 30 MB
_NUM_REMEMBERED: Final = 2  # answers: one that was late turns nobody away


class LookupDesk:
    """Asks each store once for each key, and knows since when it owes an answer.

    A request waits for a store as long as the answer may be worth to it. If the store hangs, later
    requests do not wait as long again: the time for which it has been silent counts for them too.
    A store whose last answers came too late for a request is waited for only a moment.

    Args:
        moment_seconds: that every request may wait (`reload.lookup_deadline`).
    """

    def __init__(self, moment_seconds: float) -> None:
        self._moment = moment_seconds
        self._due: dict[str, list[BlockKey]] = {}
        self._owed: dict[str, set[BlockKey]] = {}
        self._silent_since: dict[str, float] = {}  # of stores that owe something
        self._took: dict[str, deque[float]] = {}

    def ask(self, unknown: Mapping[str, Sequence[BlockKey]], now: float) -> None:
        """Ask for what is unknown, unless the question is under way already."""
        for store, keys in unknown.items():
            owed = self._owed.setdefault(store, set())
            new = [key for key in keys if key not in owed][: MAX_OWED - len(owed)]
            if new:
                owed.update(new)
                self._due.setdefault(store, []).extend(new)
                self._silent_since.setdefault(store, now)

    def take(self, epoch: int) -> list[Lookup]:
        """Return the questions that arose since the last call."""
        lookups = [Lookup(store, pack_keys(keys), epoch) for store, keys in self._due.items()]
        self._due = {}
        return lookups

    def answered(self, answer: Presence) -> None:
        """Note an answer; if more is owed, the silence begins anew when it is next looked at."""
        self._owed.get(answer.store, set()).difference_update(unpack_keys(answer.keys))
        self._silent_since.pop(answer.store, None)
        took = self._took.setdefault(answer.store, deque(maxlen=_NUM_REMEMBERED))
        took.append(answer.seconds)

    def worth_waiting(
        self, stores: Iterable[str], waited: float, patience: float, now: float
    ) -> bool:
        """Whether a request goes on waiting for one of some stores.

        Args:
            waited: seconds that it has waited.
            patience: seconds that it may wait for a store that usually answers.
        """
        return any(waited < self._allowed(it, patience, now) for it in stores)

    def reset(self) -> None:
        """Forget what was asked; it says nothing any more."""
        self._due.clear()
        self._owed.clear()
        self._silent_since.clear()

    def _allowed(self, store: str, patience: float, now: float) -> float:
        """Return the seconds that a store may be waited for; 0 if it was silent for so long."""
        took = self._took.get(store, ())
        if len(took) == _NUM_REMEMBERED and min(took) >= patience:
            patience = min(patience, self._moment)
        if not self._owed.get(store):
            return patience
        silent = now - self._silent_since.setdefault(store, now)
        return patience if silent < patience else 0.0
