"""A file store whose medium fails, by the kinds of failure that users report."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import lmdb
import pytest
from file_stores import (
    capacity_of,
    disk_usage,
    faulty_box,
    fills_up,
    open_box,
    settings_of,
    settled_free,
    wait_for,
)

from kvtiers import native
from kvtiers.data.disk_check import describe_mount
from kvtiers.data.file_index import FileIndex
from kvtiers.data.file_settings import FileStoreSettings
from kvtiers.data.file_store import FileStore
from kvtiers.data.io.choice import make_io
from kvtiers.data.slab import Slab
from kvtiers.model.outcome import Outcome
from kvtiers.testing.io_faults import FaultyIo
from kvtiers.testing.store_machine import frame_bytes, store_key_of
from kvtiers.testing.store_suite import FRAME_NBYTES, NUM_SLOTS, SLOT_NBYTES, Harness

OK, FULL, MISSING = Outcome.OK, Outcome.FULL, Outcome.MISSING
FAILED, CORRUPT = Outcome.FAILED, Outcome.CORRUPT
NO_SPACE = lmdb.Error("mdb_txn_commit: No space left on device")


@pytest.fixture
def disk(tmp_path):
    """A folder on a file system that has direct I/O as a disk has it; memory proves nothing."""
    if describe_mount(tmp_path).fs_type in ("tmpfs", "ramfs", "overlay"):
        pytest.skip(f"{tmp_path} is not on a disk")
    return tmp_path


# -- R51, R52: direct I/O -------------------------------------------------------------


def test_direct_io_is_what_the_setting_says(store_slab, disk):
    for mode, expected in (("off", False), ("on", True), ("auto", True)):
        box, engine = faulty_box(store_slab, disk / mode, direct=mode)
        box.put(1)
        flags = [_flags(op.fd) for _, op in engine.seen]
        assert {bool(flag & os.O_DIRECT) for flag in flags} == {expected}
        (report,) = box.store.paths
        assert (report.direct, report.refusal) == (expected, None)
        box.store.close()


def _flags(fd):
    lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("flags")), 8)


def test_frame_of_odd_length_is_moved_whole_sectors_at_a_time(store_slab, disk):
    box, engine = faulty_box(store_slab, disk, direct="on")
    store_slab.view(0)[:5000] = frame_bytes(1, 5000)
    frame = box.frame(1, 0, 5000)
    assert box.settle(box.store.put([frame])) == [OK]
    box.wipe(0)
    assert box.settle(box.store.get([frame])) == [OK]
    assert bytes(store_slab.view(0)[:5000]) == frame_bytes(1, 5000)
    assert {op.pieces[0][1] for _, op in engine.seen} == {8192}
    box.store.close()


def test_direct_io_refused_at_open_falls_back_once(store_slab, disk, monkeypatch, caplog):
    real = os.open

    def refusing(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    box = open_box(store_slab, disk)
    assert box.put(1, 2) == [OK] * 2
    assert box.get(1, 2) == [OK] * 2
    (report,) = box.store.paths
    assert not report.direct
    assert "EINVAL" in report.refusal
    assert len([r for r in caplog.records if "direct I/O" in r.message]) == 1
    box.store.close()


def test_direct_io_refused_at_a_write_falls_back_once(store_slab, disk, caplog):
    box, engine = faulty_box(store_slab, disk)
    engine.fail(
        writes=True,
        result=-errno.EINVAL,
        on=lambda number: bool(_flags(engine.seen[number - 1][1].fd) & os.O_DIRECT),
    )
    tickets = [box.store.put([box.filled(n, n)]) for n in range(6)]
    assert box.settle(*tickets) == [OK] * 6
    assert box.get(*range(6)) == [OK] * 6
    (report,) = box.store.paths
    assert (report.direct, report.refusal) == (False, "refused at write: EINVAL (errno 22)")
    assert len([r for r in caplog.records if "direct I/O" in r.message]) == 1
    box.store.close()


# -- R53, R61: failed writes ----------------------------------------------------------


@pytest.mark.parametrize("batched", [True, False])
def test_failed_write_leaves_its_key_absent_and_no_other(store_slab, tmp_path, batched):
    box, engine = faulty_box(store_slab, tmp_path)
    bad = store_slab.address + 1 * SLOT_NBYTES
    engine.fail(
        writes=True,
        result=-errno.EIO,
        on=lambda number: any(a <= bad < a + n for a, n in engine.seen[number - 1][1].pieces),
    )
    frames = [box.filled(n, n) for n in range(4)]
    batches = [frames] if batched else [[frame] for frame in frames]
    outcomes = box.settle(*[box.store.put(batch) for batch in batches])
    assert outcomes == [OK, FAILED, OK, OK]
    assert box.held() == {store_key_of(n) for n in (0, 2, 3)}
    assert box.get(0, 1, 2, 3) == [OK, MISSING, OK, OK]
    assert settled_free(box) == 5
    engine.heal()
    assert box.put(1) == [OK]
    box.store.close()
    box = open_box(store_slab, tmp_path)
    assert box.get(0, 1, 2, 3) == [OK] * 4
    box.store.close()


def test_frames_that_the_disk_did_not_confirm_are_not_published(store_slab, tmp_path, monkeypatch):
    """An fsync that failed once tells nothing the second time."""
    box = open_box(store_slab, tmp_path, publish_seconds=0.01)
    box.put(1)
    with monkeypatch.context() as patch:

        def failing(fd):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        patch.setattr(os, "fdatasync", failing)
        box.put(2)
        wait_for(lambda: box.store.num_unsynced > 0)
    box.put(3)
    box.store.close()
    box = open_box(store_slab, tmp_path)
    assert box.get(2, 3) == [MISSING, OK]
    assert settled_free(box) + len(box.held()) == 8
    box.store.close()


def test_dependants_of_a_failed_write_fail_with_it(store_slab, tmp_path):
    box, engine = faulty_box(store_slab, tmp_path)
    engine.fail(writes=True, result=-errno.EIO, on=1)
    put = box.store.put([box.filled(1, 0)])
    again = box.store.put([box.filled(1, 1)])
    get = box.store.get([box.frame(1, 2)])
    assert box.settle(put, again, get) == [FAILED, FAILED, MISSING]
    assert settled_free(box) == 8
    box.store.close()


# -- ENOSPC ---------------------------------------------------------------------------


@pytest.mark.parametrize("result", [-errno.ENOSPC, -errno.EDQUOT, 0, 4096])
def test_full_disk_is_full_and_loses_nothing(store_slab, tmp_path, result):
    """ENOSPC first shows up as a short count."""
    box, engine = faulty_box(store_slab, tmp_path)
    assert box.put(1, 2) == [OK] * 2
    engine.fail(writes=True, result=result, on=lambda number: True)
    assert box.put(3, 4) == [FULL] * 2
    assert box.get(1, 2, 3) == [OK, OK, MISSING]
    engine.heal()
    assert fills_up(box, 10) == 6
    box.store.close()


class Refusing:
    """An index whose commits fail: on a full disk with LMDB's base class, or as no one foresaw."""

    def __init__(self, monkeypatch, error=NO_SPACE):
        real = FileIndex.commit

        def commit(index, changes):
            if self.on:
                raise error
            real(index, changes)

        self.on = True
        monkeypatch.setattr(FileIndex, "commit", commit)


@pytest.mark.parametrize("error", [NO_SPACE, OSError(5, "EIO"), ValueError("bug")])
def test_index_that_cannot_be_written_refuses_only_what_hangs_on_it(
    store_slab, tmp_path, monkeypatch, error
):
    """A slot whose old record is still on disk is not written: a crash would mix them up."""
    box = open_box(store_slab, tmp_path, num_slots=4)
    assert box.put(1, 2, 3) == [OK] * 3
    box.store.close()
    box = open_box(store_slab, tmp_path, num_slots=4, publish_seconds=0.001)
    assert box.get(1, 2, 3) == [OK] * 3
    disk = Refusing(monkeypatch, error)
    assert box.put(4) == [OK]  # the last clean slot
    box.store.delete([store_key_of(1)])
    assert box.put(5) == [FULL]
    assert box.get(2, 3, 4, 5) == [OK, OK, OK, MISSING]
    disk.on = False
    wait_for(lambda: box.put(5) == [OK])
    box.store.close()
    box = open_box(store_slab, tmp_path, num_slots=4)
    assert box.get(1, 2, 3, 4, 5) == [MISSING, OK, OK, OK, OK]
    box.store.close()


def test_close_with_an_index_that_cannot_be_written(store_slab, tmp_path, monkeypatch):
    """Ends, and the next start finds what was published before, with the right bytes."""
    box = open_box(store_slab, tmp_path, num_slots=2)
    box.put(1, 2)
    box.store.close()
    box = open_box(store_slab, tmp_path, num_slots=2)
    disk = Refusing(monkeypatch)
    box.store.delete([store_key_of(1)])
    put = box.store.put([box.filled(3, 0)])
    box.store.close()
    assert box.settle(put) == [FULL]
    disk.on = False
    box = open_box(store_slab, tmp_path, num_slots=2)
    assert box.get(1, 2, 3) == [OK, OK, MISSING]
    assert box.slot_is(0, 1)
    box.store.close()


# -- R56, R57: the bound --------------------------------------------------------------


def test_disk_usage_stays_within_the_capacity_at_every_sample(store_slab, tmp_path):
    capacity = 2**20
    settings = settings_of(tmp_path / "kv")
    settings = type(settings)(settings.paths, capacity, publish_seconds=0.001)
    samples, stop = [], threading.Event()

    def watch():
        while not stop.is_set():
            samples.append(disk_usage(tmp_path / "kv"))

    (tmp_path / "kv").mkdir()
    watcher = threading.Thread(target=watch)
    watcher.start()
    box = Harness(FileStore(store_slab, settings), store_slab)
    kept = []
    for number in range(0, 1600, NUM_SLOTS):
        frames = [box.filled(number + i, i) for i in range(NUM_SLOTS)]
        tickets = [box.store.put([frame]) for frame in frames]
        outcomes = box.settle(*tickets)
        kept += [number + i for i, outcome in enumerate(outcomes) if outcome is OK]
        if FULL in outcomes:
            box.store.delete([store_key_of(n) for n in kept[:20]])
            kept = kept[20:]
    stop.set()
    watcher.join()
    box.store.close()
    assert max(samples) <= capacity
    assert len(samples) > 10


def test_failing_reads_are_failed_and_the_frame_stays(store_slab, tmp_path):
    box, engine = faulty_box(store_slab, tmp_path)
    box.put(1, 2)
    engine.fail(writes=False, result=-errno.EIO, on=lambda number: True)
    assert box.get(1, 2) == [FAILED] * 2
    engine.heal()
    assert box.get(1, 2) == [OK] * 2
    box.store.close()


# -- R59, R60, R62: nothing stops the rest --------------------------------------------


def test_one_failed_write_of_a_hundred(store_slab, tmp_path):
    box, engine = faulty_box(store_slab, tmp_path, num_slots=128)
    engine.fail(writes=True, result=-errno.EIO, on=3)
    outcomes = [box.put(number)[0] for number in range(100)]
    assert outcomes.count(OK) == 99
    assert settled_free(box) == 128 - 99
    box.store.close()


def test_slot_in_use_is_not_given_away(store_slab, tmp_path):
    """A frame deleted while it is read keeps its slot until the read is over."""
    box, engine = faulty_box(store_slab, tmp_path, num_slots=1)
    box.put(1)
    engine.hold = True
    get = box.store.get([box.frame(1, 5)])
    box.store.delete([store_key_of(1)])
    put = box.store.put([box.filled(2, 6)])
    engine.hold = False
    assert box.settle(get, put) == [OK, FULL]
    assert box.slot_is(5, 1)
    assert box.put(2) == [OK]
    box.store.close()


def test_sixteen_ranks_start_on_a_path_that_is_not_there(store_slab, tmp_path):
    failures, stores = [], []

    def start(rank):
        try:
            stores.append(FileStore(store_slab, settings_of(tmp_path / "a/b/c", rank=rank)))
        except BaseException as error:  # noqa: BLE001  reported below
            failures.append(error)

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for store in stores:
        store.close()
    assert failures == []
    assert len(stores) == 16


# -- R64, R65, R67, R68: nothing is left behind ----------------------------------------


@pytest.mark.parametrize("io", ["aiofiles", "native", "uring"])
def test_nothing_is_left_open(store_slab, tmp_path, io):
    if io != "aiofiles" and not native.available():
        pytest.skip("needs the compiled module")
    open_box(store_slab, tmp_path, io=io).store.close()
    fds, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        box = open_box(store_slab, tmp_path, io=io)
        box.put(*range(8))
        for _ in range(20):
            box.store.get([box.frame(n, n) for n in range(8)])  # nobody waits for them
        box.store.close()
    assert len(os.listdir("/proc/self/fd")) == fds
    assert threading.active_count() == threads


def test_file_has_the_size_of_its_slots(store_slab, tmp_path):
    box = open_box(store_slab, tmp_path, num_slots=8)
    names = sorted(path.name for path in (tmp_path / "0/0-12288").iterdir())
    assert names == ["frames.slab", "index", "owner.lock"]
    assert (tmp_path / "0/0-12288/frames.slab").stat().st_size == 4096 + 8 * SLOT_NBYTES
    assert FRAME_NBYTES < SLOT_NBYTES
    assert disk_usage(tmp_path) <= capacity_of(8)
    box.store.close()


def test_neighbours_move_in_one_call(tmp_path):
    slab = Slab(16, 8192, pin="off")
    box, engine = faulty_box(slab, tmp_path, num_slots=8)
    frames = []
    for slot in range(8):
        slab.view(slot)[:] = frame_bytes(slot, 8192)
        frames.append(box.frame(slot, slot, 8192))
    assert box.settle(box.store.put(frames)) == [OK] * 8
    backwards = [box.frame(number, 15 - number, 8192) for number in range(8)]
    assert box.settle(box.store.get(backwards)) == [OK] * 8
    assert [bytes(slab.view(15 - n)) == frame_bytes(n, 8192) for n in range(8)] == [True] * 8
    assert [(writes, len(op.pieces)) for writes, op in engine.seen] == [(True, 1), (False, 8)]
    box.store.close()
    slab.close()


@pytest.mark.parametrize(("num_frames", "frames_a_call"), [(4, 2), (16, 2), (32, 4), (128, 8)])
def test_batch_is_cut_into_calls_that_keep_the_disk_busy(tmp_path, num_frames, frames_a_call):
    """Eight calls if the batch has 256 KiB for each, more where they would exceed 1 MiB."""
    nbytes = 2**17
    slab = Slab(num_frames, nbytes, pin="off")
    settings = FileStoreSettings((tmp_path,), capacity_of(num_frames, slot_nbytes=nbytes))
    engine = FaultyIo(make_io("auto"))
    box = Harness(FileStore(slab, settings, engine), slab)
    frames = [box.frame(slot, slot, nbytes) for slot in range(num_frames)]
    assert box.settle(box.store.put(frames)) == [OK] * num_frames
    calls = [sum(size for _, size in op.pieces) // nbytes for _, op in engine.seen]
    assert calls == [frames_a_call] * (num_frames // frames_a_call)
    box.store.close()
    slab.close()
