"""What a transfer must satisfy before it is queued."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from kvtiers.data.runs import key_groups
from kvtiers.model.errors import TransferError
from kvtiers.model.keys import KEY_NBYTES
from kvtiers.model.layout import GroupLayout
from kvtiers.model.messages import NO_SLOT, Int64s, Transfer, TransferKind

_COLUMNS = (
    ("block_ids", np.int64),
    ("slots", np.int64),
    ("sources", np.uint8),
    ("targets", np.uint8),
)
_MAX_STORES = 8  # bits of a target
_READS = (TransferKind.RELOAD, TransferKind.PROMOTE)


def check_transfer(
    transfer: Transfer, groups: Sequence[GroupLayout], num_slots: int, stores: Collection[str]
) -> None:
    """Check a whole order.

    Args:
        groups: of the layout, by index. num_slots: of the slab. stores: the names there are.

    Raises:
        TransferError: a column of another length or type, an id out of range, a store that
            does not exist, or two rows that would be written to one place.
    """
    try:
        _check_columns(transfer)
        _check_stores(transfer, stores)
        _check_keys(transfer, groups)
        _check_slots(transfer, num_slots)
        if transfer.kind in (TransferKind.OFFLOAD, TransferKind.RELOAD):
            _check_blocks(transfer, groups)
    except TransferError as error:
        raise TransferError(f"job {transfer.job_id}: {error}") from None


def _check_columns(transfer: Transfer) -> None:
    if not isinstance(transfer.kind, TransferKind):
        raise TransferError(f"kind {transfer.kind!r} is none of {[k.name for k in TransferKind]}")
    if not transfer.deadline >= 0:
        raise TransferError(f"deadline {transfer.deadline} is no time from now")
    if len(transfer.keys) % KEY_NBYTES:
        raise TransferError(
            f"key column has {len(transfer.keys)} bytes, no multiple of {KEY_NBYTES}"
        )
    for name, dtype in _COLUMNS:
        column = getattr(transfer, name)
        _check_dtype(name, column, dtype)
        if len(column) != transfer.num_blocks:
            raise TransferError(
                f"column {name} has {len(column)} rows, the keys have {transfer.num_blocks}"
            )
    _check_dtype("window", transfer.window, np.int64)


def _check_dtype(name: str, column: npt.NDArray[np.generic], dtype: npt.DTypeLike) -> None:
    if column.ndim != 1 or column.dtype != dtype:
        raise TransferError(
            f"{name} has shape {column.shape} of {column.dtype}, expected one {dtype} column"
        )


def _check_stores(transfer: Transfer, stores: Collection[str]) -> None:
    num = len(transfer.stores)
    if num > _MAX_STORES or len(set(transfer.stores)) != num:
        raise TransferError(f"stores {transfer.stores} are more than {_MAX_STORES}, or repeated")
    for name in transfer.stores:
        if name not in stores:
            raise TransferError(f"no store {name!r} on this rank")
    if transfer.kind in _READS:
        lowest = 0 if transfer.kind is TransferKind.RELOAD else 1  # a PROMOTE is of what lies below
        _check_range("source", transfer.sources.astype(np.int64), lowest, num + 1)
        return
    _check_range("targets", transfer.targets.astype(np.int64), 0, 1 << num)
    if transfer.kind is TransferKind.DEMOTE and not transfer.targets.any():
        raise TransferError("blocks are demoted to no store")


def _check_keys(transfer: Transfer, groups: Sequence[GroupLayout]) -> None:
    _check_range("KV group", key_groups(transfer.keys), 0, len(groups))


def _check_slots(transfer: Transfer, num_slots: int) -> None:
    """Check ranges, and that no slot is written for two rows, or for one while another reads."""
    lowest = NO_SLOT if transfer.kind in _READS else 0
    _check_range("slot", transfer.slots, lowest, num_slots)
    _check_range("window slot", transfer.window, 0, num_slots)
    owned = transfer.slots[transfer.slots != NO_SLOT]
    if transfer.kind is TransferKind.OFFLOAD:
        _check_distinct("slot", owned)
    elif transfer.kind in _READS:
        landing = transfer.slots[(transfer.slots != NO_SLOT) & (transfer.sources > 0)]
        read = np.unique(transfer.slots[(transfer.slots != NO_SLOT) & (transfer.sources == 0)])
        _check_distinct("slot", np.concatenate((landing, read, transfer.window)))


def _check_blocks(transfer: Transfer, groups: Sequence[GroupLayout]) -> None:
    """Check ranges by KV group, and that a reload writes no block twice."""
    of_row = key_groups(transfer.keys)
    num_blocks = np.array([group.num_blocks for group in groups], np.int64)
    _check_range("block", transfer.block_ids, 0, num_blocks[of_row])
    if transfer.kind is TransferKind.RELOAD:
        for group in np.unique(of_row).tolist():
            _check_distinct(f"block of KV group {group}", transfer.block_ids[of_row == group])


def _check_range(noun: str, ids: Int64s, low: int, high: int | Int64s) -> None:
    bad = np.flatnonzero((ids < low) | (ids >= high))
    if bad.size:
        row = int(bad[0])
        last = int(np.broadcast_to(high, ids.shape)[row]) - 1
        raise TransferError(f"row {row}: {noun} {ids[row]} is not in {low}..{last}")


def _check_distinct(noun: str, ids: Int64s) -> None:
    values, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        raise TransferError(f"{noun} {values[counts > 1][0]} is written or read for two rows")
