"""Whether an LMDB environment can be read, found out in a process that may crash over it."""

from __future__ import annotations

import logging
import struct
import subprocess
import sys
from pathlib import Path
from typing import Final

import lmdb

_logger = logging.getLogger(__name__)

_CHECK_SECONDS: Final = 120.0
_META_OFFSET: Final = 16  # behind the page header
_MAGIC: Final = 0xBEEFC0DE
_META = struct.Struct("<IIQQ48s48sQQ")  # magic, version, address, map, two tables, last page, txn
_LMDB_HOME: Final = str(Path(lmdb.__file__).parents[1])
_WALK: Final = """
import sys
sys.path.append(sys.argv[2])
import lmdb
env = lmdb.open(sys.argv[1], readonly=True, lock=False, max_dbs=2)
with env.begin() as txn:
    for key, _ in list(txn.cursor()):
        db = env.open_db(key, txn=txn, create=False)
        for entry in txn.cursor(db):
            bytes(entry[0]), bytes(entry[1])
"""


def index_problem(folder: Path) -> str | None:
    """Return why the environment in a folder cannot be read, None if it can or is not there.

    A file that is shorter than the pages it counts is not opened at all: reading past its
    end would be a SIGBUS. The others are walked through in a child process.

    Raises:
        OSError: the file may not be read.
    """
    data = folder / "data.mdb"
    if not data.exists() or data.stat().st_size == 0:
        return None
    problem = _shortness(data)
    if problem is not None or not sys.executable:
        return problem
    # Without `site`: nothing of the environment but LMDB is needed, and it starts 4 times faster.
    command = [sys.executable, "-I", "-S", "-c", _WALK, str(folder), _LMDB_HOME]
    try:
        walk = subprocess.run(  # noqa: S603  our own interpreter and code
            command, capture_output=True, check=False, timeout=_CHECK_SECONDS
        )
    except OSError as error:  # of our interpreter, not of the file
        _logger.warning("%s is opened unchecked: cannot run %s: %s", folder, sys.executable, error)
        return None
    except subprocess.TimeoutExpired:
        return f"walking through it took more than {_CHECK_SECONDS:g} s"
    if walk.returncode == 0:
        return None
    said = walk.stderr.decode(errors="replace").strip().splitlines()
    return said[-1] if said else f"walking through it ended with status {walk.returncode}"


def _shortness(data: Path) -> str | None:
    """Return how an LMDB file contradicts its own meta pages."""
    size = data.stat().st_size
    with data.open("rb") as file:
        first = file.read(_META_OFFSET + _META.size)
        if len(first) < _META_OFFSET + _META.size:
            return f"{size} bytes are no LMDB file"
        metas = [_META.unpack_from(first, _META_OFFSET)]
        page_nbytes = int.from_bytes(metas[0][4][:4], "little")
        if metas[0][0] != _MAGIC or page_nbytes not in (4096, 8192, 16384, 32768, 65536):
            return "its first page is no LMDB meta page"
        file.seek(page_nbytes)
        second = file.read(_META_OFFSET + _META.size)
    if len(second) < _META_OFFSET + _META.size:
        return f"{size} bytes are less than two pages"
    metas.append(_META.unpack_from(second, _META_OFFSET))
    if metas[1][0] != _MAGIC:
        return "its second page is no LMDB meta page"
    newest = max(metas, key=lambda meta: meta[7])
    needed = (newest[6] + 1) * page_nbytes
    return f"{size} bytes, but it counts {needed}" if size < needed else None
