"""Looking after file stores that nobody has open: sound ones and damaged ones."""

import errno
import os

import pytest
from admin_boxes import held, rank_of, slab_of, slot_of, verify, write_at
from lmdb_box import NBYTES, image, key_of
from store_boxes import FileBox, OwningProcess, stopped_store

from kvtiers.data.file_settings import FILE_HEADER_NBYTES
from kvtiers.data.store_admin import find_stores, shares
from kvtiers.model.outcome import Outcome
from kvtiers.testing.store_suite import SLOT_NBYTES

pytestmark = pytest.mark.filterwarnings("error")
OK, MISSING = Outcome.OK, Outcome.MISSING


def test_stat_of_a_stopped_store(tmp_path):
    box = FileBox(tmp_path)
    assert set(box.put(*range(10))) == {OK}
    num_slots, num_free = box.store.num_slots, box.store.num_free
    box.close()
    (store,) = find_stores([tmp_path])
    found = store.stat()
    assert (found.kind, found.format_version, found.owner, found.problem) == ("nvme", 1, None, None)
    assert (found.num_frames, found.num_slots, found.num_free) == (10, num_slots, num_free)
    assert (found.slot_nbytes, found.used_nbytes) == (SLOT_NBYTES, 10 * SLOT_NBYTES)
    assert found.capacity_nbytes == num_slots * SLOT_NBYTES
    assert found.paths == (str(rank_of(tmp_path)),)
    assert found.disk_nbytes >= slab_of(tmp_path).stat().st_size
    assert 0 <= found.changed_seconds_ago < 60
    assert found.generations == {}


def test_stat_lists_the_generations(tmp_path):
    stopped_store(tmp_path)
    folder = rank_of(tmp_path).parent / "generations"
    folder.mkdir()
    (folder / "ab12").write_text("3")
    (store,) = find_stores([tmp_path])
    assert store.stat().generations == {"ab12": 3}
    (folder / "ab12").write_text("many")
    assert "is no record of a generation" in store.stat().problem


def test_all_good_frames_pass_and_nothing_is_changed(tmp_path):
    stopped_store(tmp_path, num=20)
    before = {p: p.read_bytes() for p in rank_of(tmp_path).rglob("*") if p.suffix != ".mdb"
              and p.is_file()}  # fmt: skip
    verdict = verify(tmp_path)
    assert verdict.ok
    assert (verdict.num_good, verdict.num_gone, verdict.faults) == (20, 0, [])
    assert verdict.nbytes == 20 * NBYTES
    assert {p: p.read_bytes() for p in before} == before
    assert held(tmp_path) == list(range(20))


DAMAGE = {
    "flipped payload": (lambda path, at: write_at(path, at + 5000, b"\xff\xfe"), "page 0"),
    "flipped second page": (lambda path, at: write_at(path, at + 11000, b"\xff\xfe"), "page 1"),
    "flipped header": (lambda path, at: write_at(path, at + 70, b"\xff"), "header checksum"),
    "zeroed": (lambda path, at: write_at(path, at, bytes(NBYTES)), "magic is 00000000"),
    "another's frame": (lambda path, at: write_at(path, at, image(99)), "store key is"),
    "torn": (lambda path, at: write_at(path, at + 8192, bytes(4096)), "page"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_frame_is_found_and_never_served(tmp_path, damage):
    spoil, said = damage
    stopped_store(tmp_path)
    spoil(slab_of(tmp_path), slot_of(tmp_path, 4))
    dry = verify(tmp_path, quarantine=False)
    assert not dry.ok
    assert dry.num_quarantined == 0
    verdict = verify(tmp_path)
    assert (verdict.num_good, verdict.num_quarantined, verdict.ok) == (9, 1, False)
    assert verdict.faults == dry.faults
    (fault,) = verdict.faults
    assert fault.key == key_of(4).hex()
    assert fault.place.startswith(f"{slab_of(tmp_path)}, slot ")
    assert said in fault.what
    assert verify(tmp_path).ok
    assert held(tmp_path) == [0, 1, 2, 3, 5, 6, 7, 8, 9]


def test_swapped_frames_are_both_found(tmp_path):
    stopped_store(tmp_path)
    slab = slab_of(tmp_path)
    here, there = slot_of(tmp_path, 2), slot_of(tmp_path, 7)
    write_at(slab, here, image(7))
    write_at(slab, there, image(2))
    verdict = verify(tmp_path)
    assert {fault.key for fault in verdict.faults} == {key_of(2).hex(), key_of(7).hex()}
    assert held(tmp_path) == [0, 1, 3, 4, 5, 6, 8, 9]


def test_frames_beyond_the_end_of_a_cut_file_are_found(tmp_path):
    stopped_store(tmp_path)
    slab = slab_of(tmp_path)
    os.truncate(slab, FILE_HEADER_NBYTES + 6 * SLOT_NBYTES + 100)
    verdict = verify(tmp_path)
    assert (verdict.num_good, verdict.num_quarantined) == (6, 4)
    assert {fault.what for fault in verdict.faults} == {"its file ends before it does"}
    assert len(held(tmp_path)) == 6


def test_an_error_of_the_disk_costs_the_frames_that_it_hits(tmp_path, monkeypatch):
    stopped_store(tmp_path)
    bad = slot_of(tmp_path, 5) + 4096
    real = os.preadv

    def preadv(fd, buffers, offset, flags=0):
        if offset <= bad < offset + len(buffers[0]):
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    verdict = verify(tmp_path)
    assert [(f.key, f.what) for f in verdict.faults] == [
        (key_of(5).hex(), "it cannot be read: Input/output error")
    ]
    assert verdict.num_good == 9


def test_what_was_not_in_the_page_cache_is_not_left_there(tmp_path):
    stopped_store(tmp_path, num=20, direct="off")
    slab = slab_of(tmp_path)
    fd = os.open(slab, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def cached(slot):
        try:
            os.preadv(fd, [bytearray(4096)], FILE_HEADER_NBYTES + slot * SLOT_NBYTES, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            pytest.skip(f"the file system cannot tell: {error}")
        return True

    try:
        if cached(15):
            pytest.skip("the file system keeps every page")
        assert verify(tmp_path).ok
        assert not any(cached(slot) for slot in range(20))
        os.preadv(fd, [bytearray(2**21)], 0)  # somebody has it in use
        assert cached(15)
        assert verify(tmp_path).ok
        assert cached(15)
    finally:
        os.close(fd)


def test_clear_drops_all_and_begins_a_generation(tmp_path):
    stopped_store(tmp_path)
    (store,) = find_stores([tmp_path])
    dropped = store.clear()
    assert (dropped.num_frames, dropped.num_left, dropped.by_owner) == (10, 0, False)
    box = FileBox(tmp_path)
    assert (box.numbers(), box.store.generation) == ([], 1)
    assert set(box.put(*range(box.store.num_slots))) == {OK}
    box.close()


def test_evict_drops_what_was_put_first(tmp_path):
    stopped_store(tmp_path)
    (store,) = find_stores([tmp_path])
    dropped = store.evict(4 * SLOT_NBYTES + 1)
    assert (dropped.num_frames, dropped.num_left) == (6, 4)
    assert store.evict(2**60).num_frames == 0
    assert held(tmp_path) == [6, 7, 8, 9]


def test_a_share_is_what_all_keep_together(tmp_path):
    stopped_store(tmp_path, rank=0, num=12)
    stopped_store(tmp_path, rank=1, num=6)
    stores = find_stores([tmp_path])
    assert shares(stores, 9 * SLOT_NBYTES) == [6 * SLOT_NBYTES, 3 * SLOT_NBYTES]
    assert shares(stores, 18 * SLOT_NBYTES) == [12 * SLOT_NBYTES, 6 * SLOT_NBYTES]


def test_a_share_counts_what_a_running_store_has_yet_to_publish(tmp_path):
    """Else it would seem to use nothing, and be told to drop all that it has."""
    stopped_store(tmp_path / "stopped", num=10)
    with OwningProcess(tmp_path / "running", num=10):
        stores = find_stores([tmp_path / "running", tmp_path / "stopped"])  # put a moment ago
        assert shares(stores, 10 * SLOT_NBYTES) == [5 * SLOT_NBYTES] * 2
