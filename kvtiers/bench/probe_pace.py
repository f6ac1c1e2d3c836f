"""Repeating measurements while there is time for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

_LEAST_REPEATS: Final = 2
_OVERTIME: Final = 3.0  # of a share, then what is left is not measured


class Pace:
    """Divides seconds over shapes; a share that is used up leaves the rest fewer repeats.

    Args:
        seconds: for all shapes together. num_shapes: that will be asked for.
        max_repeats: of one shape.
    """

    def __init__(
        self,
        seconds: float,
        num_shapes: int,
        max_repeats: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._shapes_left = num_shapes
        self._max_repeats = max_repeats
        self._clock = clock
        self._used = 0.0

    @property
    def exhausted(self) -> bool:
        """Whether the time was overrun by so much that nothing more should begin."""
        return self._used > _OVERTIME * self._seconds

    def repeats(self) -> Iterator[int]:
        """Yield numbers while one shape may be measured again."""
        share = max(0.0, self._seconds - self._used) / max(1, self._shapes_left)
        self._shapes_left -= 1
        started = self._clock()
        for num in range(self._max_repeats):
            over = self._clock() - started
            late = self._used + over > _OVERTIME * self._seconds
            if num and (late or (num >= _LEAST_REPEATS and over > share)):
                break
            yield num
        self._used += self._clock() - started
