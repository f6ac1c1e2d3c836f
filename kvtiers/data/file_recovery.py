"""What of an index may be believed when a file store is opened."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final

import lmdb
import numpy as np

from kvtiers.data.file_index import FileIndex, IndexChange, IndexRecord
from kvtiers.data.slab_file import SlabFile
from kvtiers.model.errors import StoreError
from kvtiers.model.keys import STORE_KEY_NBYTES, StoreKey

_logger = logging.getLogger(__name__)

INVENTORY_NBYTES: Final = 8  # of each key: one in 2**44 is mistaken among a million


def recover(
    index: FileIndex, files: Sequence[SlabFile], slot_nbytes: int
) -> dict[StoreKey, IndexRecord]:
    """Return the records whose slots are there, oldest first; the others leave the index.

    A record is believed if its slot lies in a file of this store that was long enough when
    it was opened, and if no younger record names the same slot. Whether the slot holds the
    frame is for the reader to verify.

    Raises:
        StoreError: the index cannot be written.
    """
    records = index.records()
    owners: dict[tuple[int, int], StoreKey] = {}  # of file and slot: quicker than of a `Place`
    wrong: list[StoreKey] = []
    for key, record in records.items():
        if not _is_there(record, files, slot_nbytes):
            wrong.append(key)
            continue
        place = (record.file_idx, record.slot)
        older = owners.pop(place, None)
        if older is not None:
            wrong.append(older)
        owners[place] = key
    num_found = len(records)
    for key in wrong:
        del records[key]
    if wrong:
        _logger.warning("%s: %d of %d frames are gone from their files", index.path, len(wrong),
                        num_found)  # fmt: skip
    try:
        # An index that was made for a larger capacity takes room that frames are to have.
        if index.outgrown or (wrong and not _deleted(index, wrong)):
            index.rewrite(records)
    except (OSError, lmdb.Error) as error:
        raise StoreError(f"cannot write the index {index.path}: {error}; free space on its "
                         "disk") from error  # fmt: skip
    return records


def _deleted(index: FileIndex, keys: Sequence[StoreKey]) -> bool:
    """Delete records; False where the index has not even the room for that."""
    try:
        index.commit([IndexChange(key) for key in keys])
    except lmdb.MapFullError:
        return False
    return True


def _is_there(record: IndexRecord, files: Sequence[SlabFile], slot_nbytes: int) -> bool:
    return (
        record.file_idx < len(files)
        and record.slot < files[record.file_idx].num_trusted
        and 0 < record.nbytes <= slot_nbytes
    )


def inventory_of(keys: Iterable[StoreKey]) -> bytes:
    """Return the first 8 bytes of every key, sorted as big-endian numbers, one after another."""
    column = np.frombuffer(b"".join(keys), ">u8").reshape(-1, STORE_KEY_NBYTES // INVENTORY_NBYTES)
    return np.sort(column[:, 0].astype(np.uint64)).astype(">u8").tobytes()
