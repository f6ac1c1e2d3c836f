"""How many bytes a day an SSD may be written, spread over the day."""

from __future__ import annotations

from typing import Final

DAY_SECONDS: Final = 86_400.0


class WriteBudget:
    """A token bucket: no 24 hours see more than ``nbytes_per_day`` written, from whenever on.

    The bucket holds `burst_share` of the day's bytes and is refilled with the others at an even
    rate, so that a full bucket and a day of refills together are one day's bytes. Time is a
    parameter and may stand still; it never runs backwards here.

    Args:
        nbytes_per_day: such as capacity x drive writes per day of the data sheet.
        burst_share: what may be written at once, 0 < burst_share < 1.
        now: seconds on the clock of later calls.
    """

    def __init__(self, nbytes_per_day: float, now: float, burst_share: float = 1 / 24) -> None:
        if not nbytes_per_day > 0:
            raise ValueError(f"a budget of {nbytes_per_day} bytes a day admits nothing")
        if not 0 < burst_share < 1:
            raise ValueError(f"a burst of {burst_share} of a day's bytes; must be between 0 and 1")
        self._burst_nbytes = nbytes_per_day * burst_share
        self._bytes_per_second = (nbytes_per_day - self._burst_nbytes) / DAY_SECONDS
        self._nbytes = self._burst_nbytes
        self._filled_at = now

    def affordable_nbytes(self, now: float) -> float:
        """Return the bytes that may be written now."""
        passed = max(0.0, now - self._filled_at)
        return min(self._burst_nbytes, self._nbytes + passed * self._bytes_per_second)

    def spend(self, nbytes: float, now: float) -> None:
        """Count bytes that are going to be written.

        Raises:
            ValueError: they are more than `affordable_nbytes`, or negative.
        """
        affordable = self.affordable_nbytes(now)
        if not 0 <= nbytes <= affordable:
            raise ValueError(f"{nbytes} bytes do not lie in the {affordable:.0f} left")
        self._nbytes = affordable - nbytes
        self._filled_at = max(self._filled_at, now)
