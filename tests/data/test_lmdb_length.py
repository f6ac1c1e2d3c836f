"""How long a data file is: one that LMDB has not written to its last page was not cut."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lmdb_box import MIB, Box, fill, key_of, settings_of

from kvtiers.data.lmdb_environment import LMDBEnvironment
from kvtiers.data.lmdb_files import DATA, SET_ASIDE, inspect_data, read_state
from kvtiers.data.lmdb_registry import REGISTRY
from kvtiers.data.lmdb_settings import WriteMap
from kvtiers.model.errors import CapacityError
from kvtiers.model.outcome import Outcome

FOLDER = Path(__file__).parent
OFF = {"write_map": WriteMap.OFF}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shared.lmdb"


def length(path: Path) -> int:
    return (path / DATA).stat().st_size


def map_nbytes(path: Path) -> int:
    state = read_state(path)
    assert state is not None
    return state.map_nbytes


def commit_pages_that_lmdb_does_not_write(env: LMDBEnvironment) -> None:
    """Take pages beyond the last one and let go of them, in one transaction of LMDB's alone."""
    with env._env.begin(write=True) as txn:
        txn.put(key_of(5000), bytes(200_000), db=env.frames)
        txn.delete(key_of(5000), db=env.frames)


@pytest.mark.parametrize("seed", range(4))
def test_pages_that_were_taken_and_not_needed_do_not_make_the_file_look_cut(
    path: Path, seed: int
) -> None:
    settings = settings_of(path, 16 * MIB, **OFF)
    env, rng = REGISTRY.acquire(settings), random.Random(seed)
    for _ in range(400):
        with env.writing() as txn:
            for _ in range(rng.randint(1, 6)):
                key, db = key_of(rng.randrange(40)), rng.choice((env.frames, env.index, env.order))
                if rng.random() < 0.5:
                    txn.put(key, bytes(rng.choice((10, 300, 3000, 9000, 70_000))), db=db)
                else:
                    txn.delete(key, db=db)
        found = inspect_data(path / DATA)
        assert found is not None
        assert found.complete
    REGISTRY.release(env)
    REGISTRY.release(REGISTRY.acquire(settings))
    assert not (path / SET_ASIDE).exists()


def test_process_killed_right_after_any_commit_leaves_a_file_that_the_next_one_keeps(
    path: Path,
) -> None:
    command = [sys.executable, str(FOLDER / "lmdb_child.py"), "commit_and_die", str(path), "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    box = Box(settings_of(path, **OFF))
    assert box.get(*range(20)) == [Outcome.OK] * 20
    assert not (path / SET_ASIDE).exists()
    box.close()


def test_others_see_no_cut_file_right_after_a_commit(path: Path) -> None:
    """Those of this process share the environment; what they are told is what others see."""
    box = Box(settings_of(path, **OFF))
    assert box.put(*range(20)) == [Outcome.OK] * 20
    env = REGISTRY.acquire(settings_of(path, **OFF))
    for _ in range(20):
        commit_pages_that_lmdb_does_not_write(env)
        assert box.get(1, 2) == [Outcome.OK] * 2
    REGISTRY.release(env)
    box.close()


def test_file_is_as_long_as_its_map_and_takes_no_room_for_it(path: Path) -> None:
    box = Box(settings_of(path, 64 * MIB, **OFF))
    assert box.put(*range(20)) == [Outcome.OK] * 20
    assert length(path) == map_nbytes(path) > 64 * MIB
    env = REGISTRY.acquire(settings_of(path, 64 * MIB, **OFF))
    env.grow(128 * MIB)
    assert length(path) == map_nbytes(path) > 128 * MIB
    REGISTRY.release(env)
    assert box.get(*range(20)) == [Outcome.OK] * 20
    assert (path / DATA).stat().st_blocks * 512 < 2 * MIB
    box.close()


def test_shorter_file_that_has_all_its_pages_is_kept(path: Path) -> None:
    """As kvtiers left them before it made files as long as their maps."""
    fill(path, *range(20), **OFF)
    found = inspect_data(path / DATA)
    assert found is not None
    os.truncate(path / DATA, found.needed_nbytes)
    box = Box(settings_of(path, **OFF))
    assert box.get(*range(20)) == [Outcome.OK] * 20
    assert length(path) == map_nbytes(path)
    box.close()


def test_file_that_lacks_one_page_is_set_aside(path: Path) -> None:
    fill(path, *range(20), **OFF)
    found = inspect_data(path / DATA)
    assert found is not None
    os.truncate(path / DATA, found.needed_nbytes - 1)
    box = Box(settings_of(path, **OFF))
    assert box.get(*range(20)) == [Outcome.MISSING] * 20
    assert (path / SET_ASIDE).exists()
    box.close()


def test_file_that_may_not_become_as_long_is_told_with_the_remedy(path: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, before[1]))
    try:
        with pytest.raises(CapacityError, match=r"too large.*write a smaller capacity"):
            REGISTRY.acquire(settings_of(path, 64 * MIB, **OFF))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    REGISTRY.release(REGISTRY.acquire(settings_of(path, 64 * MIB, **OFF)))
