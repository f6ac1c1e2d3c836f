"""Hold a process between two steps while another acts: ``python lmdb_races.py VERB PATH``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import lmdb
from lmdb_box import MIB, NBYTES, Box, key_of, settings_of
from lmdb_steps import in_child

from kvtiers.data.lmdb_files import DATA, SET_ASIDE, read_state
from kvtiers.data.lmdb_registry import REGISTRY
from kvtiers.model.outcome import Outcome

CAPACITY = 4 * MIB
GROWN = 5 * CAPACITY  # far more than the map of the first capacity
NUMBERS = range(GROWN // NBYTES - 40)  # of frames that fit only after growth


def grow(path: Path) -> None:
    env = REGISTRY.acquire(settings_of(path, CAPACITY))
    env.grow(GROWN)
    REGISTRY.release(env)


def grow_and_fill(path: Path) -> None:
    """Grow a store and fill what is new."""
    env = REGISTRY.acquire(settings_of(path, CAPACITY))
    env.grow(GROWN)
    box = Box(settings_of(path, CAPACITY))
    for start in range(0, len(NUMBERS), 50):
        part = NUMBERS[start : start + 50]
        assert set(box.put(*part)) == {Outcome.OK}
    box.close()
    REGISTRY.release(env)


def open_while_it_grows(path: Path) -> None:
    """A process that has read the state opens the file only after another has grown it."""
    box = Box(settings_of(path, CAPACITY))
    box.put(5000)
    reading, writing = os.pipe()

    def open_slowly() -> None:
        original = lmdb.open

        def slow(*args: Any, **more: Any) -> lmdb.Environment[Any]:
            os.write(writing, b"x")
            time.sleep(1.0)
            return original(*args, **more)

        lmdb.open = slow
        own = Box(settings_of(path, CAPACITY))
        assert own.get(5000) == [Outcome.OK]
        own.close()

    pid = os.fork()
    if pid == 0:
        os._exit(in_child(open_slowly))
    os.read(reading, 1)
    code = in_child(lambda: grow_and_fill(path))
    slow_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert (code, slow_code) == (0, 0), (code, slow_code)
    box.close()
    prove_filled(path)


def prove_filled(path: Path) -> None:
    """Everything that was written is there, in a file as large as its state says."""
    state = read_state(path)
    assert state is not None
    assert state.capacity_nbytes == GROWN
    if state.write_map:
        assert (path / DATA).stat().st_size == state.map_nbytes
    box = Box(settings_of(path, CAPACITY))
    for start in range(0, len(NUMBERS), 50):
        part = NUMBERS[start : start + 50]
        assert set(box.get(*part)) == {Outcome.OK}
    assert {key_of(n) for n in NUMBERS} <= box.held()
    box.close()
    assert not (path / SET_ASIDE).exists()


def fill_what_another_has_grown(path: Path) -> None:
    """A process that has the file open uses all of it as soon as another has grown it."""
    box = Box(settings_of(path, CAPACITY))
    assert box.put(5000) == [Outcome.OK]
    assert in_child(lambda: grow(path)) == 0
    for start in range(0, len(NUMBERS), 50):
        part = NUMBERS[start : start + 50]
        assert set(box.put(*part)) == {Outcome.OK}
    assert {key_of(n) for n in NUMBERS} <= box.held()
    box.close()
    prove_filled(path)


VERBS = {verb.__name__: verb for verb in (open_while_it_grows, fill_what_another_has_grown)}

if __name__ == "__main__":
    VERBS[sys.argv[1]](Path(sys.argv[2]))
