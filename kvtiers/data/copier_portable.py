"""The copier for engines on the CPU that needs nothing but numpy."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvtiers.data.batch_check import check_batch, check_places
from kvtiers.data.copier import CopyBatch, Direction
from kvtiers.data.copier_immediate import ImmediateCopier
from kvtiers.data.slab import Slab
from kvtiers.model.frame import FrameFormat
from kvtiers.model.layout import GroupLayout, KVLayout
from kvtiers.model.messages import Int64s, UInt8s

# From here on one assignment a block is faster than fancy indexing, which goes through a copy.
_MIN_ROW_NBYTES: Final = 4096
_MAX_FANCY_NBYTES: Final = 2**20  # bytes of that copy at most


@dataclass(frozen=True, slots=True)
class _Piece:
    """One run: uint8 [num_blocks, n] in the engine's memory, [num_slots, n] in the slab."""

    blocks: UInt8s
    slots: UInt8s


class PortableCopier(ImmediateCopier):
    """Copies with numpy's strided views, built once over the raw memory.

    The memory is the caller's: allocations and slab must outlive the copier.

    Args:
        layout: the engine's tensors. bases: address of each of its allocations.
        slab: where the slots are.
        num_threads: ignored; numpy copies on the calling thread.

    Raises:
        LayoutError: not one address per allocation. CapacityError: a slot holds no frame.
    """

    def __init__(
        self,
        layout: KVLayout,
        bases: Sequence[int],
        slab: Slab,
        num_threads: int = 1,  # noqa: ARG002  the constructors of both copiers are alike
    ) -> None:
        super().__init__()
        check_places(layout, bases, slab.slot_nbytes)
        self._groups = layout.groups
        self._num_slots = slab.num_slots
        memory = [_memory(*place) for place in zip(bases, layout.allocations, strict=True)]
        slots = _memory(slab.address, slab.num_slots * slab.slot_nbytes)
        slots = slots.reshape(slab.num_slots, slab.slot_nbytes)
        self._pieces = [_pieces(group, memory, slots) for group in layout.groups]

    def _copy(self, direction: Direction, batch: CopyBatch) -> None:
        check_batch(direction, batch, self._groups, self._num_slots)
        for piece in self._pieces[batch.group]:
            if direction is Direction.GATHER:
                _copy_rows(piece.slots, batch.slots, piece.blocks, batch.block_ids)
            else:
                _copy_rows(piece.blocks, batch.block_ids, piece.slots, batch.slots)

    def close(self) -> None:
        """Forget the views; idempotent."""
        super().close()
        self._pieces = []


def _memory(address: int, nbytes: int) -> UInt8s:
    """Return the raw bytes at an address as an array that does not own them."""
    if nbytes == 0:
        return np.empty(0, np.uint8)
    raw = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.frombuffer(memoryview(raw), np.uint8)


def _pieces(group: GroupLayout, memory: Sequence[UInt8s], slots: UInt8s) -> list[_Piece]:
    sizes = (run.nbytes for run in group.runs)
    starts = itertools.accumulate(sizes, initial=FrameFormat.of(group).header_nbytes)
    return [
        _Piece(
            np.ndarray(
                (group.num_blocks, run.nbytes),
                np.uint8,
                memory[run.allocation].data,
                run.offset,
                (run.block_stride, 1),
            ),
            slots[:, start : start + run.nbytes],
        )
        for run, start in zip(group.runs, starts, strict=False)
    ]


def _copy_rows(target: UInt8s, to: Int64s, source: UInt8s, from_: Int64s) -> None:
    """Assign ``target[to[i]] = source[from_[i]]`` for every i; no target is named twice."""
    nbytes = target.shape[1]
    if nbytes >= _MIN_ROW_NBYTES:
        for a, b in zip(to.tolist(), from_.tolist(), strict=True):
            target[a] = source[b]
        return
    step = max(1, _MAX_FANCY_NBYTES // nbytes)
    for start in range(0, len(to), step):
        target[to[start : start + step]] = source[from_[start : start + step]]
