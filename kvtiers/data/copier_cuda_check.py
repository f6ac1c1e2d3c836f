"""Whether a device's copies are right, byte for byte, before an engine relies on them."""

from __future__ import annotations

import numpy as np

from kvtiers.data.copier import CopyBatch, Direction, Marker
from kvtiers.data.copier_cuda_routes import Route, RoutedCopier, geometry
from kvtiers.data.slab import Slab
from kvtiers.model.frame import FrameFormat
from kvtiers.model.layout import GroupLayout, KVLayout
from kvtiers.model.messages import Int64s, UInt8s, int64s

_MAX_BLOCKS = 4  # of a group; the first and the last are among them
_POISON = 0xA5


def check_copies(copier: RoutedCopier, layout: KVLayout, slab: Slab) -> str | None:
    """Send random bytes through every route, in and out; return what is wrong, None if nothing.

    The routes judge each other: what one brought in, another must read back. Blocks keep their
    bytes; slots do not. Nobody else may use either meanwhile; what the engine has queued so far is
    waited for. Called on the engine's thread.

    Raises:
        RuntimeError: the driver refused a copy.
    """
    if slab.num_slots < 3:
        return f"a slab of {slab.num_slots} slots is too small to check copies in"
    seen: set[object] = set()
    for group in layout.groups:
        if geometry(group) not in seen:
            seen.add(geometry(group))
            wrong = _GroupCheck(copier, group, slab).run()
            if wrong is not None:
                return f"KV group {group.group}: {wrong}"
    return None


class _GroupCheck:
    """Blocks of one group, and three slots for each: what it held, what went in, what came out."""

    def __init__(self, copier: RoutedCopier, group: GroupLayout, slab: Slab) -> None:
        self._copier = copier
        self._group = group
        self._slab = slab
        num = min(_MAX_BLOCKS, group.num_blocks, slab.num_slots // 3)
        self._blocks = int64s(np.linspace(0, group.num_blocks - 1, num).astype(np.int64))
        self._held, self._sent, self._found = (
            int64s(np.arange(i * num, (i + 1) * num)) for i in range(3)
        )
        header = FrameFormat.of(group).header_nbytes
        self._payload = slice(header, header + group.payload_nbytes)

    def run(self) -> str | None:
        """Return what is wrong."""
        # The engine may still be filling its blocks for the first time.
        self._copy(Route.DMA, Direction.GATHER, self._held, self._copier.mark())
        try:
            for seed, there in enumerate(Route):
                self._fill(seed)
                self._copy(there, Direction.SCATTER, self._sent)
                for back in Route:
                    self._poison()
                    self._copy(back, Direction.GATHER, self._found)
                    if not self._same():
                        return f"what {there.value} brought in, {back.value} read otherwise"
        finally:
            self._copy(Route.DMA, Direction.SCATTER, self._held)
        return None

    def _copy(
        self, route: Route, direction: Direction, slots: Int64s, after: Marker | None = None
    ) -> None:
        batch = CopyBatch(self._group.group, self._blocks, slots)
        ticket = self._copier.submit_by(route, direction, batch, after)
        self._copier.wait(ticket)
        self._copier.done(ticket)

    def _slot(self, slot: int) -> UInt8s:
        return np.frombuffer(self._slab.view(slot), np.uint8)

    def _fill(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        for slot in self._sent.tolist():
            self._slot(slot)[self._payload] = random.integers(
                0, 256, self._group.payload_nbytes, np.uint8
            )

    def _poison(self) -> None:
        for slot in self._found.tolist():
            self._slot(slot)[:] = _POISON

    def _same(self) -> bool:
        """Whether what was found is what was sent, and nothing beside it was touched."""
        for sent, found in zip(self._sent.tolist(), self._found.tolist(), strict=True):
            expected = np.full(self._slab.slot_nbytes, _POISON, np.uint8)
            expected[self._payload] = self._slot(sent)[self._payload]
            if not np.array_equal(self._slot(found), expected):
                return False
        return True
