"""An LMDB environment is opened once, only where it may be, and takes what it has room for."""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import multiprocessing
import os
import pickle
import threading
import time
from pathlib import Path

import lmdb
import pytest
from lmdb_box import MIB, NBYTES, Box, fill, key_of, settings_of

from kvtiers.data import disk_check, lmdb_check
from kvtiers.data.lmdb_access import LMDBAccess
from kvtiers.data.lmdb_errors import UnavailableError
from kvtiers.data.lmdb_files import DATA, SET_ASIDE, read_state, set_aside
from kvtiers.data.lmdb_registry import REGISTRY
from kvtiers.data.lmdb_settings import Eviction
from kvtiers.model.errors import CapacityError, ProtocolError, StoreError
from kvtiers.model.keys import StoreKey
from kvtiers.model.outcome import Outcome


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shared.lmdb"


# One file, one environment


def test_aliases_of_a_path_share_one_environment(path: Path, tmp_path: Path) -> None:
    """R102."""
    fill(path, 1)
    alias = tmp_path / "alias"
    alias.symlink_to(path)
    (tmp_path / "deep").mkdir()
    names = (path, alias, tmp_path / "deep" / ".." / path.name)
    found = [REGISTRY.acquire(settings_of(name)) for name in names]
    assert found[0] is found[1] is found[2]
    for env in found:
        with env.reading() as txn:  # still open until the last one lets go
            assert txn.get(key_of(1), db=env.index) is not None
        REGISTRY.release(env)
    with pytest.raises(UnavailableError), found[0].reading():
        pass


def test_two_stores_of_one_process_share_a_file(path: Path) -> None:
    a, b = Box(settings_of(path)), Box(settings_of(path))
    assert a.put(1) == [Outcome.OK]
    assert b.get(1) == [Outcome.OK]
    a.close()
    assert b.put(2) == [Outcome.OK]
    b.close()


def test_files_are_the_owners_only(path: Path) -> None:
    old = os.umask(0)
    try:
        fill(path, 1)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o700
    assert {file.name: file.stat().st_mode & 0o777 for file in path.iterdir()} == dict.fromkeys(
        (DATA, "door.lock", "lock.mdb", "state.json", "users.lock"), 0o600
    )


def test_capacity_is_the_creators_and_disagreement_is_told(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(path, 1, capacity_nbytes=4 * MIB)
    box = Box(settings_of(path, 8 * MIB))
    assert str(4 * MIB) in caplog.text
    assert str(8 * MIB) in caplog.text
    box.put(*range(400, 464))
    for n in range(0, 400, 50):
        box.put(*range(n, n + 50))
    assert len(box.held()) == 4 * MIB // NBYTES
    box.close()


def test_map_has_room_above_the_capacity(path: Path) -> None:
    fill(path, 1, capacity_nbytes=64 * MIB)
    state = read_state(path)
    assert state is not None
    assert state.map_nbytes >= 64 * MIB / 0.85


def test_bad_versions_of_the_library_are_excluded() -> None:
    """R96."""
    needed = next(r for r in importlib.metadata.requires("kvtiers") or () if r.startswith("lmdb"))
    assert "!=2.2.0" in needed
    assert "!=2.2.1" in needed


# Growth


def test_growth_waits_for_an_open_reader_and_keeps_the_handles(path: Path) -> None:
    """R95, R96: a map is not changed under a transaction, and named databases stay valid."""
    box = Box(settings_of(path, 4 * MIB))
    assert box.put(1) == [Outcome.OK]
    env = REGISTRY.acquire(settings_of(path, 4 * MIB))
    inside = threading.Event()
    ended: list[float] = []

    def read() -> None:
        with env.reading() as txn:
            inside.set()
            time.sleep(0.3)
            assert txn.get(key_of(1), db=env.frames) is not None
            ended.append(time.monotonic())

    thread = threading.Thread(target=read)
    thread.start()
    inside.wait()
    env.grow(16 * MIB)
    assert ended
    assert time.monotonic() >= ended[0]
    thread.join()
    for n in range(0, 600, 50):
        assert box.put(*range(n, n + 50)) == [Outcome.OK] * 50
    assert len(box.held()) == 600
    REGISTRY.release(env)
    box.close()


def test_growing_to_less_is_refused(path: Path) -> None:
    env = REGISTRY.acquire(settings_of(path, 4 * MIB))
    with pytest.raises(CapacityError, match=str(2 * MIB)):
        env.grow(2 * MIB)
    REGISTRY.release(env)


# Where it may be


def test_network_file_systems_are_refused(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R107."""
    table = tmp_path / "mountinfo"
    table.write_text(
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"23 22 0:40 / {tmp_path} rw,relatime shared:1 - nfs4 server:/export rw\n"
        f"24 22 0:41 / {tmp_path}x rw - tmpfs none rw\n"
    )
    monkeypatch.setattr(disk_check, "MOUNTINFO", table)
    with pytest.raises(StoreError, match=r"nfs4.*local disk"):
        Box(settings_of(path))


def test_file_system_without_locks_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R107."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StoreError, match="without locks"):
        Box(settings_of(path))


def test_path_that_is_a_file_is_refused(path: Path) -> None:
    path.write_text("mine")
    with pytest.raises(StoreError, match="is a file"):
        Box(settings_of(path))
    assert path.read_text() == "mine"


def test_folder_that_may_not_be_written_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere: the system's answer is given for it."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(StoreError, match=r"not writable for user \d+: change its owner or mode"):
        Box(settings_of(path))


def test_memory_is_warned_of_once(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text("22 1 0:25 / / rw - tmpfs none rw\n")
    monkeypatch.setattr(disk_check, "MOUNTINFO", table)
    for _ in range(2):
        fill(path, 1)
    assert sum("does not outlive the machine" in found.message for found in caplog.records) == 1


def test_file_that_cannot_be_read_now_is_not_set_aside(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptors, no permission: that says nothing of what is in it."""
    fill(path, 1)
    for name in (DATA, "state.json"):
        original = Path.open

        def refuse(self: Path, *args: object, name: str = name, **more: object) -> object:
            if self.name == name:
                raise OSError(errno.EMFILE, "Too many open files")
            return original(self, *args, **more)  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", refuse)
            with pytest.raises(UnavailableError, match="Too many open files"):
                Box(settings_of(path))
    box = Box(settings_of(path))
    assert box.get(1) == [Outcome.OK]
    assert not (path / SET_ASIDE).exists()
    box.close()


def test_missing_parent_is_refused(path: Path) -> None:
    with pytest.raises(StoreError, match="make its parent first"):
        Box(settings_of(path / "a" / "b"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_folder_of_another_user_is_refused(path: Path) -> None:
    path.mkdir()
    os.chown(path, 12_345, -1)
    with pytest.raises(StoreError, match="12345"):
        Box(settings_of(path))


@pytest.mark.parametrize("nbytes", [2**40, 2**50], ids=["1 TiB", "above the address space"])
def test_capacity_above_the_free_disk_is_refused(path: Path, nbytes: int) -> None:
    free = os.statvfs(path.parent)
    nbytes += 2 * free.f_bavail * free.f_frsize
    with pytest.raises(CapacityError, match="capacity of at most"):
        Box(settings_of(path, nbytes))
    fill(path, 1)  # nothing of the attempt is in the way


def test_whatever_stands_for_the_data_file_is_set_aside_every_time(path: Path) -> None:
    path.mkdir()
    for make in (Path.touch, Path.mkdir, Path.mkdir, Path.touch):
        make(path / DATA)
        set_aside(path)
        assert [found.name for found in path.iterdir()] == [SET_ASIDE]


def test_store_of_another_format_is_not_destroyed(path: Path) -> None:
    fill(path, 1)
    state = (path / "state.json").read_text()
    (path / "state.json").write_text(state.replace('"version": 1', '"version": 2'))
    with pytest.raises(StoreError, match="format 2"):
        Box(settings_of(path))
    (path / "state.json").write_text(state)
    box = Box(settings_of(path))
    assert box.get(1) == [Outcome.OK]
    box.close()


# What is put, and how


def test_batch_larger_than_the_store_reports_every_frames_fate(path: Path) -> None:
    """R97: LMDB itself loses the whole batch."""
    box = Box(settings_of(path, 20 * NBYTES, eviction=Eviction.NONE), num_slots=100)
    outcomes = box.put(*range(100))
    assert outcomes == [Outcome.OK] * 20 + [Outcome.FULL] * 80
    assert box.held() == {key_of(n) for n in range(20)}
    box.close()


def test_full_map_costs_only_the_frames_that_find_no_room(path: Path) -> None:
    """R97: an old reader keeps every page, so that nothing that is freed can be used."""
    box = Box(settings_of(path, 4 * MIB), num_slots=400)
    env = REGISTRY.acquire(settings_of(path, 4 * MIB))
    with env.reading():
        outcomes = [o for start in range(0, 4000, 200) for o in box.put(*range(start, start + 200))]
    assert set(outcomes) == {Outcome.OK, Outcome.FULL}
    assert box.put(*range(5000, 5200)) == [Outcome.OK] * 200
    assert (path / DATA).stat().st_size <= env.map_nbytes
    REGISTRY.release(env)
    box.close()
    lmdb_check.check(path)


@pytest.mark.parametrize("nbytes", [0, 31, 33, 512])
def test_keys_of_another_size_are_refused(path: Path, nbytes: int) -> None:
    """R105."""
    box = Box(settings_of(path))
    with pytest.raises(ProtocolError, match=f"{nbytes} bytes, expected 32"):
        box.store.delete([StoreKey(bytes(nbytes))])
    box.close()


def test_readers_beyond_the_table_are_told_apart_from_loss(path: Path) -> None:
    """R99: what is busy comes back without being opened again."""
    access = LMDBAccess(settings_of(path, max_readers=2))
    env = access.open()
    refused = pytest.raises(UnavailableError, match="no transaction")
    with env.reading(), env.reading(), refused, access.reading():
        pass
    with access.reading():
        assert access.open() is env
    access.close()


# Pickling


def read_elsewhere(access: LMDBAccess, key: StoreKey) -> bool:
    with access.reading() as session:
        return session.txn.get(key, db=session.env.index) is not None


def test_settings_and_access_go_to_a_spawned_process(path: Path) -> None:
    """R106."""
    box = Box(settings_of(path))
    assert box.put(1) == [Outcome.OK]
    access = LMDBAccess(settings_of(path))
    access.open()
    assert pickle.loads(pickle.dumps(access.settings)) == access.settings
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(read_elsewhere, (access, key_of(1)))
    with pytest.raises(TypeError, match="LMDBStoreSettings"):
        pickle.dumps(box.store)
    access.close()
    box.close()


def test_lmdb_is_the_library_that_was_tried() -> None:
    assert lmdb.version() >= (0, 9, 24)
