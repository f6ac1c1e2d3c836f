"""A store whose file goes away misses, and comes back."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest
from lmdb_box import Box, settings_of

from kvtiers.data.lmdb_access import LMDBAccess
from kvtiers.data.lmdb_errors import UnavailableError
from kvtiers.data.lmdb_files import DATA
from kvtiers.data.lmdb_settings import WriteMap
from kvtiers.model.outcome import Outcome


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shared.lmdb"


def wait_until_back(box: Box, number: int, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while box.put(number) != [Outcome.OK]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("write_map", list(WriteMap))
@pytest.mark.parametrize("harm", ["file removed", "folder removed", "cut", "emptied"])
def test_file_that_goes_is_a_miss_and_the_store_recovers(
    path: Path, harm: str, write_map: WriteMap, caplog: pytest.LogCaptureFixture
) -> None:
    """R34."""
    box = Box(settings_of(path, write_map=write_map))
    assert box.put(*range(60)) == [Outcome.OK] * 60
    caplog.set_level(logging.WARNING)
    if harm == "cut":
        os.truncate(path / DATA, 100_000)
    elif harm == "emptied":
        os.truncate(path / DATA, 0)
    elif harm == "file removed":
        (path / DATA).unlink()
    else:
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    assert box.get(1, 2) == [Outcome.MISSING] * 2
    for n in range(5):
        box.get(n)
    assert box.held() == set()
    wait_until_back(box, 100)
    assert box.get(100, 1) == [Outcome.OK, Outcome.MISSING]
    assert sum("is away" in record.message for record in caplog.records) == 1
    assert sum("is back" in record.message for record in caplog.records) == 1
    box.close()


def test_file_that_may_not_be_read_is_a_miss_until_it_may(path: Path) -> None:
    """R34."""
    box = Box(settings_of(path))
    assert box.put(1) == [Outcome.OK]
    (path / DATA).chmod(0)
    assert box.get(1) == [Outcome.MISSING]
    assert box.put(2) == [Outcome.FAILED]
    (path / DATA).chmod(0o600)
    wait_until_back(box, 3)
    assert box.get(1) == [Outcome.OK]
    box.close()


def test_away_store_is_probed_seldom(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    access = LMDBAccess(settings_of(path, reprobe_seconds=5.0), clock=lambda: now[0])
    access.open()
    (path / DATA).chmod(0)
    with pytest.raises(UnavailableError), access.reading():
        pass
    (path / DATA).chmod(0o600)
    for now[0] in (0.0, 4.0):
        with pytest.raises(UnavailableError):
            access.open()
    now[0] = 5.0
    access.open()
    access.close()
