"""How many frames loads ask a store for at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_FRAMES_IN_STORE: Final = 64  # deep enough for any disk, shallow enough to stop soon
_NUM_IN_WINDOW: Final = 2  # portions: one is copied while the other is read


@dataclass(frozen=True, slots=True)
class Portions:
    """Bounds of what a store brings together: a batch of frames comes when all of it is there.

    Several portions under way keep a medium as busy as one large batch does, and what has come
    is verified and copied to HBM beside them. Each portion costs some 0.1 ms of the interpreter:
    of a store as fast as memory, portions of 8 MiB lost a twentieth, those of 16 MiB nothing.

    Attributes:
        max_frames, max_nbytes: of a portion, one frame at least.
        min_nbytes: a window whose half is less than that comes together.
    """

    max_frames: int = 16
    max_nbytes: int = 2**24
    min_nbytes: int = 2**21

    def num_frames(self, frame_nbytes: int, window: int | None = None) -> int:
        """Return the frames of one portion.

        Args:
            window: staging slots of the load, None where each frame has a slot of its own.
        """
        most = max(1, min(self.max_frames, self.max_nbytes // frame_nbytes))
        if window is None:
            return most
        part = max(1, window // _NUM_IN_WINDOW)
        return min(most, part if part * frame_nbytes >= self.min_nbytes else window)


PORTIONS: Final = Portions()
