"""Read a whole LMDB data file, as a program of its own: a damaged one kills who maps it.

``python -m kvtiers.data.lmdb_check FOLDER`` ends with 0 where all of it can be read and fits
together, with 1 and a line on standard error where not, or by a signal.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import Final

import lmdb
from xxhash import xxh3_64_intdigest

from kvtiers.data.lmdb_records import (
    COUNTERS_KEY,
    FRAMES,
    INDEX,
    META,
    ORDER,
    PREFIX_NBYTES,
    Counters,
    IndexRecord,
    footprint,
    key_of_order,
    order_key,
)
from kvtiers.model.frame import MAGIC

_NUM_PAGES_AT: Final = 12
_FIXED_NBYTES: Final = 56
_TABLE_AT: Final = 64


class DamageError(Exception):
    """The file does not fit together; the message says where."""


def check(folder: Path) -> int:
    """Read every page, and compare what must agree; returns the number of frames.

    The frames' headers are verified, their pages only read: only who knows the layout can
    verify those, and does so whenever a frame arrives in DRAM.

    Raises:
        DamageError: something does not agree. lmdb.Error: a page is none.
    """
    env = lmdb.open(str(folder), readonly=True, lock=False, create=False, max_dbs=4, readahead=True)
    with env.begin(buffers=True) as txn:
        dbs = {name: env.open_db(name, txn, create=False) for name in (FRAMES, INDEX, ORDER, META)}
        record = txn.get(COUNTERS_KEY, db=dbs[META])
        if record is None:
            raise DamageError("no counters")
        counters = Counters.decode(record)
        used = num = 0
        for key, raw in txn.cursor(dbs[INDEX]):
            index = IndexRecord.decode(raw)
            _check_frame(bytes(key), index, txn.get(key, db=dbs[FRAMES]))
            if (
                txn.get(order_key(index.clock, key_of_order(b"\0" * 8 + key)), db=dbs[ORDER])
                is None
            ):
                raise DamageError(f"frame {bytes(key).hex()} has no place in the order")
            used += footprint(index.nbytes)
            num += 1
        for name in (FRAMES, ORDER):
            if txn.stat(dbs[name])["entries"] != num:
                raise DamageError(f"{name.decode()} does not have the index's {num} entries")
        if (used, num) != (counters.used_nbytes, counters.num_frames):
            raise DamageError(f"{num} frames of {used} bytes, the counters say otherwise")
    return num


def _check_frame(key: bytes, index: IndexRecord, value: memoryview | None) -> None:
    held = -1 if value is None else len(value)
    if value is None or held != index.nbytes - len(index.prefix):
        raise DamageError(f"frame {key.hex()} has {held} bytes of {index.nbytes}")
    xxh3_64_intdigest(value)  # reads all of it
    if index.prefix[: len(MAGIC)] != MAGIC or index.nbytes < _TABLE_AT:
        return  # not one of our frames: nothing says what it should be
    (num_pages,) = struct.unpack_from("<I", index.prefix, _NUM_PAGES_AT)
    end = _TABLE_AT + 8 * num_pages
    if end > index.nbytes:
        raise DamageError(f"frame {key.hex()} has {num_pages} pages in {index.nbytes} bytes")
    head = index.prefix + bytes(value[: end - PREFIX_NBYTES])
    (stored,) = struct.unpack_from("<Q", head, _FIXED_NBYTES)
    if head[24:_FIXED_NBYTES] != key:
        raise DamageError(f"frame {key.hex()} holds another key")
    if stored != xxh3_64_intdigest(head[:_FIXED_NBYTES] + head[_TABLE_AT:]):
        raise DamageError(f"frame {key.hex()} has a damaged header")


def verdict(folder: Path, seconds: float) -> str | None:
    """Check a folder's data file in a child process; returns what is wrong, None if nothing is.

    Args:
        folder: of the environment, which nobody has open. seconds: how long it may take.

    Raises:
        TimeoutError: it was not done by then.
    """
    command = [sys.executable, "-m", "kvtiers.data.lmdb_check", str(folder)]
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            command, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"its check took longer than {seconds:g} s") from None
    except OSError as error:
        return f"its check cannot run: {error}"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"its check was killed by signal {-done.returncode}"
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"its check ended with {done.returncode}"


def main() -> int:
    """Check the folder named on the command line."""
    try:
        check(Path(sys.argv[1]))
    except (DamageError, lmdb.Error, ValueError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
