"""What fails in an LMDB store costs no other frame; a changed or inherited file is opened anew."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import lmdb
import pytest
from lmdb_box import Box, key_of, settings_of

from kvtiers.data.lmdb_files import DATA
from kvtiers.data.lmdb_reader import LMDBReader
from kvtiers.data.lmdb_settings import Eviction
from kvtiers.data.lmdb_writer import LMDBWriter
from kvtiers.model.outcome import Outcome

OK, FULL, FAILED, MISSING = Outcome.OK, Outcome.FULL, Outcome.FAILED, Outcome.MISSING


@pytest.mark.parametrize(
    ("error", "outcome"), [(lmdb.MapFullError("full"), FULL), (lmdb.Error("EIO"), FAILED)]
)
def test_of_a_batch_that_is_refused_only_the_frame_at_fault_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: lmdb.Error, outcome: Outcome
) -> None:
    """R97: LMDB itself loses all of it."""
    real = LMDBWriter._transact

    def transact(writer: LMDBWriter, frames: list) -> list[Outcome]:
        if any(frame.key == key_of(5) for frame in frames):
            raise error
        return real(writer, frames)

    monkeypatch.setattr(LMDBWriter, "_transact", transact)
    box = Box(settings_of(tmp_path / "shared.lmdb", eviction=Eviction.NONE))
    assert box.put(*range(11)) == [OK] * 5 + [outcome] + [OK] * 5
    assert box.get(4, 6) == [OK, OK]
    box.close()


@pytest.mark.parametrize("error", [OSError(5, "EIO"), ValueError("bug"), MemoryError()])
@pytest.mark.parametrize(("owner", "verb"), [(LMDBWriter, "put"), (LMDBReader, "get")])
def test_error_of_any_kind_costs_one_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, verb: str, error: Exception
) -> None:
    """R60: the 3rd of 10; the threads of the store live on."""
    calls, real = itertools.count(1), getattr(owner, verb)

    def failing(self: object, frames: list) -> list[Outcome]:
        if next(calls) == 3:
            raise error
        return real(self, frames)

    monkeypatch.setattr(owner, verb, failing)
    box = Box(settings_of(tmp_path / "shared.lmdb"))
    puts = [box.put(n)[0] for n in range(10)]
    gets = [box.get(n)[0] for n in range(10)]
    if owner is LMDBWriter:
        assert puts == [OK, OK, FAILED, *[OK] * 7]
        assert gets == [OK, OK, MISSING, *[OK] * 7]
    else:
        assert puts == [OK] * 10
        assert gets == [OK, OK, FAILED, *[OK] * 7]
    box.close()


def test_file_that_was_exchanged_is_not_written_to_in_vain(tmp_path: Path) -> None:
    """R34: the one that is open has no name any more; nobody else would ever find a frame there."""
    path = tmp_path / "shared.lmdb"
    box = Box(settings_of(path))
    assert box.put(1) == [OK]
    shutil.copy(path / DATA, tmp_path / "copy")
    os.replace(tmp_path / "copy", path / DATA)
    deadline = time.monotonic() + 20
    while box.put(2) != [OK]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    other = Box(settings_of(path))
    assert other.get(2) == [OK]
    other.close()
    box.close()


FORKING = """
import os, sys
from pathlib import Path
from kvtiers.data.lmdb_access import LMDBAccess
from kvtiers.data.lmdb_errors import UnavailableError
from kvtiers.data.lmdb_settings import LMDBStoreSettings

access = LMDBAccess(LMDBStoreSettings(Path(sys.argv[1]), 2**22))
inherited = access.open()
child = os.fork()
if child == 0:
    try:
        with inherited.reading():
            os._exit(1)
    except UnavailableError:
        pass
    with access.reading() as session:
        os._exit(2 if session.env is inherited else 0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
with access.reading() as session:
    assert session.env is inherited
access.close()
"""


def test_forked_child_reads_by_an_environment_of_its_own(tmp_path: Path) -> None:
    """R100: with the parent's it would use the parent's place among the readers."""
    command = [sys.executable, "-W", "ignore", "-c", FORKING, str(tmp_path / "shared.lmdb")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
