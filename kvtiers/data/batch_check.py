"""What a copy batch must satisfy before its first byte moves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtiers.data.copier import CopyBatch, Direction
from kvtiers.model.errors import CapacityError, LayoutError, TransferError
from kvtiers.model.frame import slot_nbytes_for
from kvtiers.model.layout import GroupLayout, KVLayout
from kvtiers.model.messages import Int64s


def check_places(layout: KVLayout, bases: Sequence[int], slot_nbytes: int) -> None:
    """Check what a copier is built from.

    Args:
        layout: the engine's tensors. bases: address of each of its allocations.
        slot_nbytes: bytes of a slot.

    Raises:
        LayoutError: not one address per allocation. CapacityError: a slot holds no frame.
    """
    if len(bases) != len(layout.allocations):
        raise LayoutError(f"{len(bases)} addresses for {len(layout.allocations)} allocations")
    needed = slot_nbytes_for(layout.groups)
    if slot_nbytes < needed:
        raise CapacityError(f"a slot has {slot_nbytes} bytes, the largest frame {needed}")


def check_columns(batch: CopyBatch) -> None:
    """Check that both columns are one-dimensional int64.

    Raises:
        TransferError: they are not.
    """
    for noun, column in (("block ids", batch.block_ids), ("slots", batch.slots)):
        if column.ndim != 1 or column.dtype != np.int64:
            raise TransferError(
                f"{noun} have shape {column.shape} of {column.dtype}, expected one int64 column"
            )


def check_batch(
    direction: Direction, batch: CopyBatch, groups: Sequence[GroupLayout], num_slots: int
) -> None:
    """Check a whole batch.

    Args:
        direction: of the copy; it says which column is the target.
        batch: the columns. groups: of the layout, by index. num_slots: of the slab.

    Raises:
        TransferError: no such group, columns of unequal length, an id out of range, or two
            rows with one target: the writes would race. Names the row, value and range.
    """
    check_columns(batch)
    if not 0 <= batch.group < len(groups):
        raise TransferError(f"KV group {batch.group} is not in 0..{len(groups) - 1}")
    if len(batch.block_ids) != len(batch.slots):
        raise TransferError(f"{len(batch.block_ids)} block ids but {len(batch.slots)} slots")
    _check_range("block id", batch.block_ids, groups[batch.group].num_blocks)
    _check_range("slot", batch.slots, num_slots)
    if direction is Direction.GATHER:
        _check_distinct("slot", batch.slots)
    else:
        _check_distinct("block id", batch.block_ids)


def _check_range(noun: str, ids: Int64s, count: int) -> None:
    bad = np.flatnonzero((ids < 0) | (ids >= count))
    if bad.size:
        row = int(bad[0])
        raise TransferError(f"row {row}: {noun} {ids[row]} is not in 0..{count - 1}")


def _check_distinct(noun: str, ids: Int64s) -> None:
    if len(set(ids.tolist())) == len(ids):
        return
    first: dict[int, int] = {}
    for row, value in enumerate(ids.tolist()):
        if value in first:
            raise TransferError(
                f"row {row}: {noun} {value} is already the target of row {first[value]}"
            )
        first[value] = row
