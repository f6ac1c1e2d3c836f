"""A file is used after a clean end, checked after a crash, and set aside where it is damaged."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from lmdb_box import Box, fill, settings_of

from kvtiers.data import lmdb_check, lmdb_settings
from kvtiers.data.lmdb_access import LMDBAccess
from kvtiers.data.lmdb_errors import UnavailableError
from kvtiers.data.lmdb_files import DATA, SET_ASIDE, inspect_data
from kvtiers.data.lmdb_settings import WriteMap
from kvtiers.model.outcome import Outcome


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shared.lmdb"


def no_check(*_: object) -> str:
    raise AssertionError("the file was checked")


def test_after_a_clean_end_another_boot_needs_no_check(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path, 1, boot_id="monday")
    monkeypatch.setattr(lmdb_check, "verdict", no_check)
    box = Box(settings_of(path, boot_id="tuesday"))
    assert box.get(1) == [Outcome.OK]
    box.close()


def test_killed_process_of_this_boot_needs_no_check(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path, 1, clean=False)
    monkeypatch.setattr(lmdb_check, "verdict", no_check)
    box = Box(settings_of(path))
    assert box.get(1) == [Outcome.OK]
    box.close()


def test_after_a_crash_of_the_machine_a_whole_file_is_checked_and_kept(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(path, 1, 2, clean=False, boot_id="monday")
    box = Box(settings_of(path, boot_id="tuesday"))
    assert "checking all of it" in caplog.text
    assert box.get(1, 2) == [Outcome.OK] * 2
    assert not (path / SET_ASIDE).exists()
    box.close()


@pytest.mark.parametrize("write_map", list(WriteMap))
@pytest.mark.parametrize("page", [2, 5, 9, 12])
def test_after_a_crash_of_the_machine_a_damaged_file_is_set_aside(
    path: Path, page: int, write_map: WriteMap
) -> None:
    fill(path, 1, 2, 3, clean=False, boot_id="monday", write_map=write_map)
    with (path / DATA).open("r+b") as file:
        file.seek(page * 4096)
        file.write(b"\xff" * 4096)
    before = lmdb_check.verdict(path, 30)
    box = Box(settings_of(path, boot_id="tuesday", write_map=write_map))
    outcomes = box.get(1, 2, 3)  # a frame that arrives is verified by whoever asked
    box.close()
    assert (path / SET_ASIDE).exists() == (before is not None)
    if before is not None:
        assert outcomes == [Outcome.MISSING] * 3


def test_check_that_takes_too_long_sets_aside(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_settings, "_SLOW_DISK", 1e12)
    fill(path, 1, clean=False, boot_id="monday")
    box = Box(settings_of(path, boot_id="tuesday", check_seconds=0.01))
    assert box.get(1) == [Outcome.MISSING]
    assert (path / SET_ASIDE).exists()
    box.close()


def test_check_has_the_time_that_a_slow_disk_needs(path: Path) -> None:
    settings = settings_of(path, check_seconds=60.0)
    assert settings.patience(2**20) == 60.0
    assert settings.patience(200 * 2**30) == pytest.approx(2147, rel=0.01)
    assert replace(settings, hurried=True).patience(200 * 2**30) == 60.0


def test_check_in_a_hurry_sets_nothing_aside(path: Path) -> None:
    """An engine that serves waits for nobody, and loses no store over it."""
    fill(path, 1, clean=False, boot_id="monday")
    hurried = settings_of(path, boot_id="tuesday", check_seconds=0.01, hurried=True)
    with pytest.raises(UnavailableError, match="longer than"):
        LMDBAccess(hurried).open()
    box = Box(settings_of(path, boot_id="tuesday"))
    assert box.get(1) == [Outcome.OK]
    box.close()


@pytest.mark.parametrize("write_map", list(WriteMap))
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5])
def test_file_cut_while_closed_is_set_aside(
    path: Path, share: float, write_map: WriteMap, caplog: pytest.LogCaptureFixture
) -> None:
    """R104: reading beyond the end would kill the process."""
    fill(path, *range(60), write_map=write_map)
    found = inspect_data(path / DATA)
    assert found is not None
    os.truncate(path / DATA, int(found.needed_nbytes * share))
    box = Box(settings_of(path, write_map=write_map))
    assert box.get(1) == [Outcome.MISSING]
    assert box.put(1) == [Outcome.OK]
    assert "set aside" in caplog.text
    box.close()


def test_file_of_something_else_is_set_aside(path: Path) -> None:
    path.mkdir()
    (path / DATA).write_bytes(b"precious" * 4096)
    fill(path, 1)
    assert (path / SET_ASIDE).read_bytes() == b"precious" * 4096
