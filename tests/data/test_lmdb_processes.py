"""One LMDB store, many processes: killed, forked, out of readers, out of disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from lmdb_box import MIB, NBYTES, Box, key_of, settings_of

from kvtiers.data import lmdb_check
from kvtiers.data.lmdb_files import DATA, SET_ASIDE, read_state
from kvtiers.model.outcome import Outcome

CHILD = Path(__file__).with_name("lmdb_child.py")
CAPACITY = 4 * MIB
SECONDS = int(os.environ.get("KVTIERS_LMDB_SECONDS", "15"))


def run(verb: str, path: Path, argument: int, seconds: float = 120) -> str:
    """Run a child to its end; returns what it printed."""
    command = [sys.executable, str(CHILD), verb, str(path), str(argument)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@contextmanager
def running(verb: str, path: Path, argument: int) -> Iterator[str]:
    """Run a child while the test does something; gives its first line, kills it in the end."""
    command = [sys.executable, str(CHILD), verb, str(path), str(argument)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield child.stdout.readline().strip()
        finally:
            child.send_signal(signal.SIGKILL)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shared.lmdb"


def whole(path: Path) -> None:
    """Assert that everything in a store fits together, and that it has kept its bounds."""
    state = read_state(path)
    assert state is not None
    assert (path / DATA).stat().st_size <= state.map_nbytes
    assert not (path / SET_ASIDE).exists()
    lmdb_check.check(path)


def test_what_one_process_writes_another_finds(path: Path) -> None:
    box = Box(settings_of(path, CAPACITY))
    with running("hold", path, 7) as line:
        assert line == "OK"
        assert box.get(7, 8) == [Outcome.OK, Outcome.MISSING]
        assert box.put(8) == [Outcome.OK]
    box.close()


def test_killed_process_leaves_its_frames_and_no_lock(path: Path) -> None:
    with running("hold", path, 7):
        pass
    box = Box(settings_of(path, CAPACITY))
    assert box.get(7) == [Outcome.OK]
    assert box.put(8) == [Outcome.OK]
    box.close()


def test_readers_that_were_killed_give_their_places_back(path: Path) -> None:
    """R99: the table has four places, one is ours."""
    box = Box(settings_of(path, CAPACITY, max_readers=4))
    assert box.put(1) == [Outcome.OK]
    for _ in range(6):
        with running("read_and_hold", path, 4) as line:
            assert line == "ready"
    assert box.get(1) == [Outcome.OK]
    box.close()


def test_full_reader_table_is_a_miss_and_not_the_end(path: Path) -> None:
    """R99: live readers of others have all places."""
    box = Box(settings_of(path, CAPACITY, max_readers=3))
    assert box.put(1) == [Outcome.OK]
    with running("read_and_hold", path, 3), running("read_and_hold", path, 3):
        with running("read_and_hold", path, 3):
            assert box.get(1) == [Outcome.MISSING]
            assert box.put(2) == [Outcome.OK]
        assert box.get(1, 2) == [Outcome.OK] * 2
    box.close()


def test_fork_leaves_parent_and_child_able_to_read(path: Path) -> None:
    """R100, R101: the child opens its own, the parent's stays as it was."""
    box = Box(settings_of(path, CAPACITY))
    assert box.put(1) == [Outcome.OK]
    run("fork_and_read", path, 0)
    assert box.get(1, 2) == [Outcome.OK] * 2
    box.close()


def test_opening_and_closing_in_many_processes_never_fails(path: Path) -> None:
    """R101."""
    box = Box(settings_of(path, CAPACITY))
    assert box.put(1) == [Outcome.OK]
    box.close()  # so that some find it closed by everybody
    command = [sys.executable, str(CHILD), "churn", str(path), "30"]
    children = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(10)]
    for child in children:
        _, errors = child.communicate(timeout=120)
        assert child.returncode == 0, errors
    whole(path)


def test_full_disk_fails_frames_and_keeps_those_before(path: Path) -> None:
    """A commit that the disk refuses raises the base lmdb.Error."""
    run("disk_full", path, 600_000)
    box = Box(settings_of(path, CAPACITY))
    assert box.get(2) == [Outcome.OK]
    box.close()


def test_lost_file_is_made_anew_though_another_process_is_idle(path: Path) -> None:
    """Whoever makes it anew must have it alone; the idle one finds out by itself."""
    box = Box(settings_of(path, CAPACITY))
    with running("hold", path, 7):
        assert box.get(7) == [Outcome.OK]
        os.truncate(path / DATA, 50_000)
        assert box.get(7) == [Outcome.MISSING]
        deadline = time.monotonic() + 20
        while box.put(8) != [Outcome.OK]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert box.get(7, 8) == [Outcome.MISSING, Outcome.OK]
    box.close()


def test_no_writer_starves_another(path: Path) -> None:
    """LMDB's write lock is not fair by itself."""
    written = [int(word) for word in run("compete", path, 2).split()]
    assert min(written) * 5 > max(written), written


@pytest.mark.slow
def test_writers_killed_in_mid_transaction_leave_a_whole_store(path: Path) -> None:
    run("kill_writers", path, 60)
    whole(path)
    box = Box(settings_of(path, CAPACITY), num_slots=400)
    held = box.held()
    assert len(held) == CAPACITY // NBYTES
    numbers = [n for seed in range(60) for n in range(seed * 1000, seed * 1000 + 999)]
    numbers = [n for n in numbers if key_of(n) in held]
    assert box.get(*numbers) == [Outcome.OK] * len(held)
    box.close()


@pytest.mark.slow
def test_eight_processes_with_kills_eviction_and_growth_see_only_misses(path: Path) -> None:
    """For 15 s, or for KVTIERS_LMDB_SECONDS."""
    kills = int(run("nursery", path, SECONDS, SECONDS + 120))
    assert kills > 4 * SECONDS
    whole(path)
    state = read_state(path)
    assert state is not None
    assert state.capacity_nbytes == 3 * CAPACITY
