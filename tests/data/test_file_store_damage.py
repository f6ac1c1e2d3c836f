"""Files of a store that are damaged between two runs and under a running one: no wrong byte."""

from __future__ import annotations

import os
import random
import shutil
import warnings
from pathlib import Path

import pytest
from file_stores import fills_up, open_box, settled_free

from kvtiers.data.slab import Slab
from kvtiers.model.errors import StoreError
from kvtiers.model.frame import FrameFormat
from kvtiers.model.outcome import Outcome
from kvtiers.testing.store_machine import frame_bytes, store_key_of
from kvtiers.testing.store_suite import NUM_SLOTS, SLOT_NBYTES

OK, MISSING, CORRUPT, FAILED = Outcome.OK, Outcome.MISSING, Outcome.CORRUPT, Outcome.FAILED
FORMAT = FrameFormat((SLOT_NBYTES // 3, SLOT_NBYTES // 3))
NUMBERS = range(6)
OWN = "0/0-12288"


def fill(box):
    """Put sealed frames."""
    for number in NUMBERS:
        slot = box.slab.view(number)
        slot[FORMAT.header_nbytes : FORMAT.frame_nbytes] = payload_of(number)
        FORMAT.seal(slot, store_key_of(number))
    refs = [box.frame(number, number, FORMAT.frame_nbytes) for number in NUMBERS]
    assert box.settle(box.store.put(refs)) == [OK] * len(NUMBERS)


def payload_of(number):
    return frame_bytes(number, FORMAT.payload_nbytes)


def served(box):
    """Get all frames as the executor does; returns those that would be served, with right bytes."""
    found = []
    for number in NUMBERS:
        box.wipe(0)
        ref = box.frame(number, 0, FORMAT.frame_nbytes)
        (outcome,) = box.settle(box.store.get([ref]))
        assert outcome in (OK, MISSING, CORRUPT, FAILED)
        if outcome is not OK:
            continue
        frame = box.slab.view(0)
        if FORMAT.fault(frame, store_key_of(number)) is None:
            assert frame[FORMAT.header_nbytes : FORMAT.frame_nbytes] == payload_of(number)
            found.append(number)
        else:
            box.store.delete([store_key_of(number)])
    return found


# -- what happens to the file of the frames -------------------------------------------


def cut(file: Path) -> None:
    os.truncate(file, 4096 + 2 * SLOT_NBYTES + 5000)


def emptied(file: Path) -> None:
    os.truncate(file, 0)


def flipped(file: Path) -> None:
    """One bit of every frame but the first."""
    chance = random.Random(4)
    with file.open("r+b") as opened:
        for number in NUMBERS[1:]:
            offset = 4096 + number * SLOT_NBYTES + chance.randrange(SLOT_NBYTES)
            if offset % SLOT_NBYTES >= 4096 + 100:  # not in what pads the header
                offset = 4096 + number * SLOT_NBYTES + 20
            opened.seek(offset)
            byte = opened.read(1)[0]
            opened.seek(offset)
            opened.write(bytes([byte ^ 1 << chance.randrange(8)]))


def frames_swapped(file: Path) -> None:
    body = file.read_bytes()
    slots = [body[4096 + i * SLOT_NBYTES :][:SLOT_NBYTES] for i in NUMBERS]
    with file.open("r+b") as opened:
        opened.seek(4096)
        opened.write(b"".join(slots[i ^ 1] for i in NUMBERS))


def overwritten(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.write(bytes(4096 + 4 * SLOT_NBYTES))


def replaced(file: Path) -> None:
    """By a file of the same length, under the same name."""
    other = file.with_name("other")
    other.write_bytes(os.urandom(file.stat().st_size))
    other.rename(file)


def deleted(file: Path) -> None:
    file.unlink()


def made_a_link(file: Path) -> None:
    target = file.with_name("target")
    file.rename(target)
    file.symlink_to(target)


# what would be served at most after it: between two runs, under a running store
DAMAGE = {
    cut: ({0, 1}, {0, 1}),
    emptied: (set(), set()),
    flipped: ({0}, {0}),
    frames_swapped: (set(), set()),
    overwritten: (set(), {4, 5}),
    replaced: (set(), set(NUMBERS)),  # its descriptor is of the old file
    deleted: (set(), set(NUMBERS)),
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_damage_between_two_runs(store_slab, tmp_path, damage, direct):
    box = open_box(store_slab, tmp_path, direct=direct)
    fill(box)
    box.store.close()
    damage(tmp_path / OWN / "frames.slab")
    box = open_box(store_slab, tmp_path, direct=direct)
    assert set(served(box)) == DAMAGE[damage][0]
    goes_on(box, store_slab, tmp_path, direct)


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_damage_under_a_running_store(store_slab, tmp_path, damage, direct):
    box = open_box(store_slab, tmp_path, direct=direct)
    fill(box)
    damage(tmp_path / OWN / "frames.slab")
    assert set(served(box)) == DAMAGE[damage][1]
    goes_on(box, store_slab, tmp_path, direct)


def goes_on(box, slab, folder, direct):
    """No slot is lost, new frames are kept, and there is a next start."""
    free = settled_free(box)
    assert fills_up(box, 100) == free
    held = len(box.held())
    box.store.close()
    box = open_box(slab, folder, direct=direct)
    assert len(box.held()) in (held, 0)  # 0: its file is another one now
    assert box.store.num_free + len(box.held()) == box.store.num_slots
    box.store.close()


def test_link_in_place_of_the_file_is_refused(store_slab, tmp_path):
    box = open_box(store_slab, tmp_path)
    fill(box)
    made_a_link(tmp_path / OWN / "frames.slab")
    assert served(box) == list(NUMBERS)
    box.store.close()
    with pytest.raises(StoreError, match=r"frames.slab.*regular file.*remove it"):
        open_box(store_slab, tmp_path)


# -- what happens to the index --------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 4096, 8192, 16384])
def test_index_cut_under_a_running_store(store_slab, tmp_path, nbytes):
    """Reading its mapping would be a SIGBUS: it is left alone, and the next start has another."""
    box = open_box(store_slab, tmp_path, publish_seconds=0.0)
    fill(box)
    os.truncate(tmp_path / OWN / "index/data.mdb", nbytes)
    assert served(box) == list(NUMBERS)
    box.store.delete([store_key_of(0)])
    box.put(50)
    assert served(box) == list(NUMBERS)[1:]
    box.store.close()
    box = open_box(store_slab, tmp_path)
    assert set(served(box)) <= set(NUMBERS)
    free = settled_free(box)
    assert fills_up(box, 100) == free
    box.store.close()


@pytest.mark.parametrize("what", ["data.mdb", "lock.mdb", ""])
def test_index_deleted_under_a_running_store(store_slab, tmp_path, what):
    box = open_box(store_slab, tmp_path, publish_seconds=0.0)
    fill(box)
    index = tmp_path / OWN / "index"
    if what:
        (index / what).unlink()
    else:
        shutil.rmtree(index)
    box.put(50)
    assert served(box) == list(NUMBERS)
    box.store.close()
    box = open_box(store_slab, tmp_path)
    assert set(served(box)) in (set(), set(NUMBERS))
    box.store.close()


# -- R27, R34, R36: files change under a running store ---------------------------------


def test_files_deleted_under_a_running_store(store_slab, tmp_path):
    """Its descriptors still work; nothing fails, and the restart is empty."""
    box = open_box(store_slab, tmp_path)
    box.put(1, 2)
    shutil.rmtree(tmp_path / "0")
    assert box.get(1, 2) == [OK] * 2
    box.store.delete([store_key_of(1)])
    assert box.put(3) == [OK]
    assert settled_free(box) == 6
    box.store.close()
    box = open_box(store_slab, tmp_path)
    assert box.get(1, 2, 3) == [MISSING] * 3
    box.store.close()


def test_file_cut_under_a_running_store_is_corrupt_once_then_missing(store_slab, tmp_path):
    box = open_box(store_slab, tmp_path)
    box.put(1, 2, 3)
    os.truncate(tmp_path / "0/0-12288/frames.slab", 4096 + SLOT_NBYTES + 100)
    assert box.get(1, 2, 3) == [OK, CORRUPT, CORRUPT]
    for _ in range(5):
        assert box.get(2, 3) == [MISSING] * 2
    assert settled_free(box) == 7
    assert box.put(2, 3) == [OK] * 2
    assert box.get(1, 2, 3) == [OK] * 3
    assert box.slot_is(1, 2)
    box.store.close()


def test_files_made_unreadable_under_a_running_store(store_slab, tmp_path):
    box = open_box(store_slab, tmp_path)
    box.put(1)
    for file in [*tmp_path.rglob("*"), tmp_path / "0"]:
        file.chmod(0)
    assert box.get(1) == [OK]
    assert box.put(2) == [OK]
    for file in (tmp_path / "0", tmp_path / "0/0-12288", *(tmp_path / "0/0-12288").iterdir()):
        file.chmod(0o700)
    box.store.close()


# -- made unreadable ------------------------------------------------------------------


def told_as_nobody(folder: Path) -> str:
    """Return what another user is told of a store; a child process becomes that user."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child uses no thread of ours
        child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            slab = Slab(NUM_SLOTS, SLOT_NBYTES, pin="off")
            box = open_box(slab, folder)
            box.put(1)
            box.store.close()
            os.write(writer, b"fine")
        except StoreError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with open(reader, "rb") as told:
        return told.read().decode()


@pytest.mark.parametrize("name", ["frames.slab", "owner.lock", "index", "index/data.mdb"])
def test_made_unreadable_between_two_runs(tmp_path_factory, name):
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    top = Path(os.path.realpath(tmp_path_factory.mktemp("shut")))
    for parent in (top, *top.parents[:3]):
        parent.chmod(0o755)
    folder = top / "kv"
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    assert told_as_nobody(folder) == "fine"
    (folder / OWN / name).chmod(0)
    told = told_as_nobody(folder)
    assert str(folder / OWN / name.split("/")[0]) in told
    assert "Permission denied" in told
    assert "user 65534 may write" in told or "writable by user 65534" in told
    (folder / OWN / name).chmod(0o700 if name == "index" else 0o600)
    assert told_as_nobody(folder) == "fine"
