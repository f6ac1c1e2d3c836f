"""Looking after LMDB stores: stopped, shared, damaged, untrusted, killed in the middle."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lmdb_box import MIB, NBYTES, Box, image, key_of, settings_of

from kvtiers.data.lmdb_check import check
from kvtiers.data.lmdb_files import distrust
from kvtiers.data.lmdb_records import footprint
from kvtiers.data.store_admin import find_stores
from kvtiers.model.errors import KVTiersError, StoreError
from kvtiers.model.outcome import Outcome

pytestmark = pytest.mark.filterwarnings("error")
OK, MISSING = Outcome.OK, Outcome.MISSING
CHILD = Path(__file__).with_name("lmdb_child.py")


def quiet(frames, nbytes):
    """Take progress."""


def made(path, num=20, capacity_nbytes=4 * MIB):
    """Make a store of frames 0, 1, ... and stop it."""
    box = Box(settings_of(path, capacity_nbytes))
    for start in range(0, num, 50):
        part = range(start, min(num, start + 50))
        assert set(box.put(*part)) == {OK}
    box.close()


@pytest.fixture
def store(tmp_path):
    """A stopped store of 20 frames."""
    path = tmp_path / "store"
    made(path)
    return path


def admin(path):
    (found,) = find_stores([path])
    return found


def flip(path, number, offset=5000):
    """Change a frame in the file."""
    data = path / "data.mdb"
    at = data.read_bytes().index(image(number)[16:]) - 16
    fd = os.open(data, os.O_RDWR)
    byte = os.pread(fd, 1, at + offset)
    os.pwrite(fd, bytes([byte[0] ^ 1]), at + offset)
    os.fsync(fd)
    os.close(fd)


def change_state(path, **fields):
    state = path / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | fields))


@contextlib.contextmanager
def running(path, verb="hold", number=3):
    """Another process that has the store open."""
    command = [sys.executable, str(CHILD), verb, str(path), str(number)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().strip() in ("OK", "ready")
        yield process
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()


def test_stat_of_a_stopped_store(store):
    (store / "generations").mkdir()
    (store / "generations" / "cd34").write_text("5")
    found = admin(store).stat()
    assert (found.kind, found.format_version, found.owner, found.problem) == ("lmdb", 1, None, None)
    assert (found.num_frames, found.used_nbytes) == (20, 20 * footprint(NBYTES))
    assert found.capacity_nbytes == 4 * MIB
    assert (found.num_slots, found.slot_nbytes) == (None, None)
    assert found.generations == {"cd34": 5}
    assert found.disk_nbytes > found.used_nbytes
    assert found.num_changes_since_oldest_access >= 0
    assert 0 <= found.changed_seconds_ago < 60
    check(store)


def test_stat_names_who_has_it_open(store):
    with running(store) as first, running(store, number=4) as second:
        found = admin(store).stat()
        assert found.owner.pids == tuple(sorted((first.pid, second.pid)))
        assert found.num_frames == 20
    assert admin(store).stat().owner is None


def test_all_good_frames_pass(store):
    verdict = admin(store).verify(quiet, quarantine=True)
    assert verdict.ok
    assert (verdict.num_good, verdict.num_quarantined) == (20, 0)
    assert check(store) == 20


def test_many_frames_are_verified_in_several_transactions(tmp_path):
    made(tmp_path / "many", num=200)
    seen = []
    verdict = admin(tmp_path / "many").verify(lambda n, b: seen.append(n), quarantine=True)
    assert verdict.num_good == sum(seen) == 200
    assert len(seen) > 2


@pytest.mark.parametrize(("offset", "said"), [(5000, "page 0"), (11000, "page 1"), (70, "header"),
                                              (30, "store key")])  # fmt: skip
def test_a_damaged_frame_is_found_and_dropped(store, offset, said):
    flip(store, 7, offset)
    dry = admin(store).verify(quiet, quarantine=False)
    assert (dry.num_good, dry.num_quarantined, dry.ok) == (19, 0, False)
    verdict = admin(store).verify(quiet, quarantine=True)
    assert (verdict.num_good, verdict.num_quarantined, verdict.ok) == (19, 1, False)
    (fault,) = verdict.faults
    assert fault.key == key_of(7).hex()
    assert said in fault.what
    assert check(store) == 19
    box = Box(settings_of(store))
    assert box.get(6, 7, 8) == [OK, MISSING, OK]
    assert box.put(7) == [OK]
    assert box.get(7) == [OK]
    box.close()


def test_a_running_store_is_verified_and_cured_in_place(store):
    with running(store):
        flip(store, 7)
        verdict = admin(store).verify(quiet, quarantine=True)
        assert (verdict.num_good, verdict.num_quarantined) == (19, 1)
        box = Box(settings_of(store))
        assert box.get(6, 7) == [OK, MISSING]
        box.close()


def test_a_store_in_use_by_this_process_is_verified_through_the_same_environment(store):
    box = Box(settings_of(store))
    assert admin(store).verify(quiet, quarantine=True).num_good == 20
    assert admin(store).clear().num_frames == 20
    assert box.get(1) == [MISSING]
    assert box.put(1) == [OK]
    box.close()


def test_clear_drops_all_for_all(tmp_path):
    made(tmp_path / "many", num=200)
    with running(tmp_path / "many", number=3):
        dropped = admin(tmp_path / "many").clear()
    assert (dropped.num_left, dropped.by_owner) == (0, False)
    assert dropped.num_frames == 200
    assert check(tmp_path / "many") == 0


def test_clear_is_done_in_pieces(tmp_path):
    path = tmp_path / "many"
    made(path, num=700, capacity_nbytes=16 * MIB)
    assert admin(path).clear().num_frames == 700
    assert check(path) == 0


def test_evict_drops_what_was_used_longest_ago(store):
    box = Box(settings_of(store))
    for number in range(100, 200):  # time passes, so that an access counts
        assert box.put(number) == [OK]
    assert box.get(0, 1, 2) == [OK] * 3
    assert box.put(200) == [OK]  # before a change, accesses are noted
    dropped = admin(store).evict(10 * footprint(NBYTES))
    assert (dropped.num_frames, dropped.num_left) == (111, 10)
    assert {key_of(n) for n in (0, 1, 2)} <= box.held()
    assert admin(store).evict(2**50).num_frames == 0
    box.close()
    assert check(store) == 10


def test_what_a_crash_of_the_machine_left_whole_is_verified(store):
    change_state(store, boot_id="of yesterday", clean=False)
    assert "in use when the machine stopped" in admin(store).stat().problem
    dry = admin(store).verify(quiet, quarantine=False)
    assert "fits together" in dry.problem
    assert json.loads((store / "state.json").read_text())["boot_id"] == "of yesterday"
    verdict = admin(store).verify(quiet, quarantine=True)
    assert (verdict.num_good, verdict.ok) == (20, True)
    assert admin(store).stat().problem is None


def test_what_a_crash_of_the_machine_tore_is_set_aside(store):
    change_state(store, boot_id="of yesterday", clean=False)
    data = store / "data.mdb"
    chance = random.Random(1)
    with data.open("r+b") as file:
        for page in range(2, 60):
            file.seek(page * 4096)
            file.write(chance.randbytes(100))
    before = data.stat().st_ino
    dry = admin(store).verify(quiet, quarantine=False)
    assert "does not fit together" in dry.problem
    assert data.stat().st_ino == before
    verdict = admin(store).verify(quiet, quarantine=True)
    assert "was set aside" in verdict.problem
    assert (store / "set-aside.mdb").stat().st_ino == before
    assert admin(store).stat().num_frames == 0


def test_what_an_engine_has_found_damaged_is_read_as_a_whole(store):
    distrust(store)
    assert "was found damaged since" in admin(store).stat().problem
    assert "fits together" in admin(store).verify(quiet, quarantine=False).problem
    assert admin(store).verify(quiet, quarantine=True).num_good == 20
    assert admin(store).stat().problem is None


def test_a_cut_file_kills_nobody(store):
    os.truncate(store / "data.mdb", 5 * 4096)
    assert "was cut" in admin(store).stat().problem
    dry = admin(store).verify(quiet, quarantine=False)
    assert not dry.ok
    assert (store / "data.mdb").stat().st_size == 5 * 4096
    assert "was set aside" in admin(store).verify(quiet, quarantine=True).problem


def test_a_store_of_another_format_is_left_alone(store):
    change_state(store, version=9)
    before = {p: p.read_bytes() for p in store.iterdir()}
    with pytest.raises(KVTiersError, match="holds a store of format 9, this kvtiers has 1"):
        find_stores([store])
    assert {p: p.read_bytes() for p in store.iterdir()} == before


def test_a_store_without_its_state_is_said(store):
    (store / "state.json").unlink()
    assert "nothing says what wrote" in admin(store).stat().problem
    assert "was set aside" in admin(store).verify(quiet, quarantine=True).problem


def test_the_folder_above_an_lmdb_store_is_refused_with_its_name(store):
    with pytest.raises(StoreError, match=f"but {store} is an LMDB store: name that"):
        find_stores([store.parent])


CLEAR = """
import os, signal, sys
from pathlib import Path
from kvtiers.data.lmdb_shelf import Shelf
from kvtiers.data.store_admin import find_stores

(store,) = find_stores([Path(sys.argv[1])])
left, save = int(sys.argv[2]), Shelf.save

def save_or_die(shelf):
    global left
    save(shelf)
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

Shelf.save = save_or_die
store.clear()
"""


@pytest.mark.parametrize("turn", [1, 2, 3, 4, 5])
def test_whoever_is_killed_in_the_middle_of_clear_leaves_a_whole_store(tmp_path, turn):
    """900 frames go in pieces of 256, the last 132 with whatever came meanwhile."""
    path = tmp_path / "many"
    made(path, num=900, capacity_nbytes=16 * MIB)
    command = [sys.executable, "-c", CLEAR, str(path), str(turn)]
    ended = subprocess.run(command, check=False, timeout=60)
    assert ended.returncode == (0 if turn == 5 else -signal.SIGKILL)
    left = 0 if turn == 5 else 900 - 256 * (turn - 1)
    assert check(path) == left
    verdict = admin(path).verify(quiet, quarantine=True)
    assert (verdict.ok, verdict.num_good) == (True, left)
    assert admin(path).clear().num_frames == left
