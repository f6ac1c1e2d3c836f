"""Looking after file stores: stopped, running, damaged, killed in the middle."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import lmdb
import pytest
from file_stores import open_box
from lmdb_box import NBYTES, image, key_of
from store_boxes import FileBox, OwningProcess, stopped_store

from kvtiers.data.file_orders import ORDER, Order, Verb, leave_order
from kvtiers.data.file_settings import FILE_HEADER_NBYTES
from kvtiers.data.slab import Slab
from kvtiers.data.store_admin import find_stores, shares
from kvtiers.model.errors import StoreError
from kvtiers.model.outcome import Outcome
from kvtiers.testing.store_suite import SLOT_NBYTES

pytestmark = pytest.mark.filterwarnings("error")
OK, MISSING = Outcome.OK, Outcome.MISSING


def quiet(frames, nbytes):
    """Take progress."""


def rank_of(path: Path) -> Path:
    """Return the only rank's folder in a path."""
    (lock,) = path.glob("*/*/owner.lock")
    return lock.parent


def slab_of(path: Path) -> Path:
    return rank_of(path) / "frames.slab"


def slot_of(path: Path, number: int) -> int:
    """Return where the frame of a number starts in its file."""
    return slab_of(path).read_bytes().index(image(number))


def write_at(path: Path, offset: int, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.pwrite(fd, data, offset)
    os.fsync(fd)
    os.close(fd)


def verify(*paths, quarantine=True, patience=10.0):
    (store,) = find_stores(paths, patience)
    return store.verify(quiet, quarantine=quarantine)


def held(*paths, **settings):
    """Open a store, return the numbers of its frames that can be read."""
    box = FileBox(*paths, **settings)
    numbers = [n for n in box.numbers() if box.get(n) == [OK]]
    assert numbers == box.numbers()
    box.close()
    return numbers


# -- stopped --------------------------------------------------------------------------


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


# -- which store ----------------------------------------------------------------------


def test_all_instances_and_ranks_below_a_path_are_found(tmp_path):
    stopped_store(tmp_path, instance="a", rank=0)
    stopped_store(tmp_path, instance="a", rank=1)
    stopped_store(tmp_path, instance="b", rank=0)
    (tmp_path / "foreign" / "folder").mkdir(parents=True)
    names = [store.name for store in find_stores([tmp_path])]
    assert len(names) == 3
    assert [store.name for store in find_stores([tmp_path / "a"])] == names[:2]
    assert [store.name for store in find_stores([Path(names[2])])] == names[2:]
    assert [store.name for store in find_stores([tmp_path, tmp_path / "a"])] == names
    assert [p.name for p in (tmp_path / "foreign").rglob("*")] == ["folder"]


def test_stores_of_several_slot_sizes_lie_beside_each_other(tmp_path):
    stopped_store(tmp_path)
    slab = Slab(4, 2 * SLOT_NBYTES, pin="off")
    open_box(slab, tmp_path).store.close()
    slab.close()
    small, large = sorted((store.stat() for store in find_stores([tmp_path])),
                          key=lambda found: found.slot_nbytes)  # fmt: skip
    assert (small.slot_nbytes, small.num_frames) == (SLOT_NBYTES, 10)
    assert (large.slot_nbytes, large.num_frames) == (2 * SLOT_NBYTES, 0)


def test_a_striped_store_wants_all_its_paths(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    stopped_store(a, b, num=20)
    (store,) = find_stores([b, a])
    assert store.stat().paths == (str(rank_of(a)), str(rank_of(b)))
    assert store.verify(quiet, quarantine=True).num_good == 20
    (half,) = find_stores([a])
    assert "name all of them" in half.stat().problem
    with pytest.raises(StoreError, match="striped over 2 paths: name all of them"):
        half.verify(quiet, quarantine=True)
    with pytest.raises(StoreError, match="is path 2 of a store that is striped"):
        find_stores([b])
    assert held(a, b) == list(range(20))


def test_the_frames_of_a_file_that_is_gone_are_lost(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    stopped_store(a, b, num=20)
    slab_of(b).unlink()
    (store,) = find_stores([a, b])
    assert "path 2 of 2 is gone" in store.stat().problem
    verdict = store.verify(quiet, quarantine=True)
    assert (verdict.num_good, verdict.num_quarantined) == (10, 10)


def test_another_stores_file_is_not_read(tmp_path):
    stopped_store(tmp_path / "a")
    stopped_store(tmp_path / "b")
    shutil.copy(slab_of(tmp_path / "b"), slab_of(tmp_path / "a"))
    verdict = verify(tmp_path / "a", quarantine=False)
    assert (verdict.num_good, len(verdict.faults)) == (0, 10)


def no_such(path):
    return path / "none", "there is no such folder"


def empty(path):
    return path, "holds no store; name the `path` of an lmdb tier"


def a_file(path):
    (path / "x").write_text("")
    return path / "x", "is a file, not the folder of a store"


def a_yaml(path):
    (path / "kvtiers.yaml").write_text("")
    return path / "kvtiers.yaml", "not the configuration"


def the_slab(path):
    stopped_store(path)
    return slab_of(path), "is a file of a store; name its folder"


def the_index(path):
    stopped_store(path)
    return rank_of(path) / "index", f"is the index of a file store; name {path}"


def foreign_lmdb(path):
    lmdb.open(str(path)).close()
    return path, "is an LMDB environment, but none of kvtiers"


def never_opened(path):
    stopped_store(path)
    slab_of(path).unlink()
    shutil.rmtree(rank_of(path) / "index")
    return path, "never opened to the end"


@pytest.mark.parametrize(
    "make", [no_such, empty, a_file, a_yaml, the_slab, the_index, foreign_lmdb, never_opened]
)
def test_what_is_no_store_is_refused_and_left_alone(tmp_path, make):
    path, said = make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StoreError) as refusal:
        find_stores([path])
    assert said in str(refusal.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_store_of_another_format_is_left_alone(tmp_path):
    stopped_store(tmp_path)
    env = lmdb.open(str(rank_of(tmp_path) / "index"), max_dbs=2)
    with env.begin(write=True) as txn:
        meta = env.open_db(b"meta", txn)
        found = txn.get(b"store", db=meta)
        txn.put(b"store", (7).to_bytes(4, "little") + found[4:], db=meta)
    env.close()
    (store,) = find_stores([tmp_path])
    assert "is of format 7, this kvtiers has 1" in store.stat().problem
    for verb in (
        lambda: store.verify(quiet, quarantine=True),
        store.clear,
        lambda: store.evict(0),
    ):
        with pytest.raises(StoreError, match="is of format 7"):
            verb()


@pytest.mark.parametrize("size", [0.5, 3.0])
def test_a_damaged_index_is_said_and_kills_nobody(tmp_path, size):
    stopped_store(tmp_path)
    data = rank_of(tmp_path) / "index" / "data.mdb"
    if size < 1:
        os.truncate(data, 3 * 4096)
    else:
        chance = random.Random(1)
        for page in range(2, data.stat().st_size // 4096):
            write_at(data, page * 4096 + 10, chance.randbytes(200))
    (store,) = find_stores([tmp_path])
    assert "is damaged" in store.stat().problem
    verdict = store.verify(quiet, quarantine=True)
    assert not verdict.ok
    assert "its frames are lost" in verdict.problem
    assert held(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_store_is_refused(tmp_path):
    stopped_store(tmp_path)
    os.chown(rank_of(tmp_path), 12345, -1)
    with pytest.raises(StoreError, match="belongs to user 12345"):
        find_stores([tmp_path])


# -- running --------------------------------------------------------------------------


def test_a_running_store_says_who_owns_it(tmp_path):
    with OwningProcess(tmp_path) as owner:
        (store,) = find_stores([tmp_path])
        found = wait_frames(store, 10)
        assert found.owner.pids == (owner.pid,)
        assert abs(found.owner.since - time.time()) < 60
        assert found.owner.host
    assert store.stat().owner is None


def wait_frames(store, num, *, at_least=False):
    """Wait until the owner has published its frames."""
    deadline = time.monotonic() + 10
    while (found := store.stat()).num_frames != num:
        if at_least and found.num_frames > num:
            break
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def test_a_running_store_is_verified_beside_its_owner(tmp_path):
    with OwningProcess(tmp_path) as owner:
        (store,) = find_stores([tmp_path])
        wait_frames(store, 10)
        write_at(slab_of(tmp_path), slot_of(tmp_path, 3) + 6000, b"\xff\xfe")
        verdict = store.verify(quiet, quarantine=True)
        assert (verdict.num_good, verdict.num_quarantined) == (9, 1)
        assert verdict.problem is None
        assert owner.get(3, 4) == ["MISSING", "OK"]
        assert store.verify(quiet, quarantine=True).ok
        assert owner.tell("put", 3) == ["OK"]
        assert owner.get(3) == ["OK"]
    assert held(tmp_path) == list(range(10))


def test_the_owner_clears_and_evicts(tmp_path):
    with OwningProcess(tmp_path) as owner:
        (store,) = find_stores([tmp_path])
        wait_frames(store, 10)
        dropped = store.evict(4 * SLOT_NBYTES)
        assert (dropped.num_frames, dropped.num_left, dropped.by_owner) == (6, 4, True)
        assert owner.get(5, 6) == ["MISSING", "OK"]
        dropped = store.clear()
        assert (dropped.num_frames, dropped.num_left, dropped.by_owner) == (4, 0, True)
        assert owner.get(6, 9) == ["MISSING", "MISSING"]
        assert owner.tell("put", 6) == ["OK"]
        assert sorted(p.name for p in rank_of(tmp_path).iterdir()) == [
            "frames.slab",
            "index",
            "owner.lock",
        ]
    assert held(tmp_path) == [6]


def test_an_owner_that_does_not_answer_is_told_about(tmp_path):
    with OwningProcess(tmp_path) as owner:
        (store,) = find_stores([tmp_path], 0.3)
        wait_frames(store, 10)
        owner.signal(signal.SIGSTOP)
        with pytest.raises(StoreError) as refusal:
            store.clear()
        assert f"process {owner.pid} on host" in str(refusal.value)
        assert "the order is withdrawn" in str(refusal.value)
        owner.signal(signal.SIGCONT)
        assert not (rank_of(tmp_path) / ORDER).exists()
        time.sleep(0.6)
        assert owner.get(0, 9) == ["OK", "OK"]


def test_frames_that_an_unheard_owner_keeps_are_not_called_quarantined(tmp_path):
    with OwningProcess(tmp_path) as owner:
        (store,) = find_stores([tmp_path], 0.3)
        wait_frames(store, 10)
        write_at(slab_of(tmp_path), slot_of(tmp_path, 3) + 6000, b"\xff\xfe")
        owner.signal(signal.SIGSTOP)
        verdict = store.verify(quiet, quarantine=True)
        owner.signal(signal.SIGCONT)
        assert (len(verdict.faults), verdict.num_quarantined) == (1, 0)
        assert "not all that is damaged is quarantined" in verdict.problem


def test_what_a_killed_owner_was_asked_for_is_done_without_it(tmp_path):
    with OwningProcess(tmp_path) as owner:
        (store,) = find_stores([tmp_path])
        wait_frames(store, 10)
        owner.signal(signal.SIGSTOP)
        killer = subprocess.Popen(
            [sys.executable, "-c", f"import os, time; time.sleep(0.5); os.kill({owner.pid}, 9)"]
        )
        dropped = store.clear()
        killer.wait(30)
        owner.wait()
    assert (dropped.num_frames, dropped.by_owner) == (10, False)
    assert not (rank_of(tmp_path) / ORDER).exists()
    assert held(tmp_path) == []


def test_an_order_that_lies_there_waits_for_no_later_life(tmp_path):
    stopped_store(tmp_path)
    leave_order(rank_of(tmp_path), Order(Verb.CLEAR, time.time() - 1))
    box = FileBox(tmp_path)
    assert box.get(1) == [OK]
    box.close()
    assert not (rank_of(tmp_path) / ORDER).exists()


def test_frames_that_come_and_go_are_never_accused(tmp_path):
    with OwningProcess(tmp_path, mode="churn"):
        (store,) = find_stores([tmp_path])
        wait_frames(store, 10, at_least=True)
        end = time.monotonic() + 4
        num = 0
        while time.monotonic() < end:
            verdict = store.verify(quiet, quarantine=False)
            assert verdict.faults == []
            assert verdict.num_good >= 10
            num += 1
        assert num > 5
    assert held(tmp_path)[:10] == list(range(10))


# -- killed ---------------------------------------------------------------------------

CLEAR = """
import sys
from pathlib import Path
from kvtiers.data.store_admin import find_stores
(store,) = find_stores([Path(sys.argv[1])])
print("go", flush=True)
store.clear() if sys.argv[2] == "clear" else store.evict(3 * {slot})
"""


@pytest.mark.parametrize("verb", ["clear", "evict"])
def test_whoever_is_killed_in_the_middle_has_done_all_or_nothing(tmp_path, verb):
    for turn, delay in enumerate([0.0, 0.05, 0.1, 0.2, 0.4, None]):
        path = tmp_path / str(turn)
        stopped_store(path)
        command = [sys.executable, "-c", CLEAR.format(slot=SLOT_NBYTES), str(path), verb]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"go\n"
        if delay is not None:
            time.sleep(delay)
            process.kill()
        process.wait(60)
        process.stdout.close()
        left = held(path)
        done = [] if verb == "clear" else [7, 8, 9]
        assert left == done or (delay is not None and left == list(range(10)))


DIE = """
import os, signal, sys
from pathlib import Path
from kvtiers.data import store_admin_files
from kvtiers.data.file_index import FileIndex
from kvtiers.data.store_admin import find_stores

(store,) = find_stores([Path(sys.argv[1])])
left, commit = int(sys.argv[2]), FileIndex.commit

def commit_or_die(index, changes):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    commit(index, changes)

FileIndex.commit = commit_or_die
store_admin_files._COMMIT_KEYS = 2
store.evict(0)
"""


@pytest.mark.parametrize("turn", [1, 2, 5])
def test_an_eviction_that_was_killed_has_dropped_the_oldest_so_far(tmp_path, turn):
    stopped_store(tmp_path)
    ended = subprocess.run(
        [sys.executable, "-c", DIE, str(tmp_path), str(turn)], check=False, timeout=60
    )
    assert ended.returncode == -signal.SIGKILL
    assert held(tmp_path) == list(range(2 * (turn - 1), 10))
