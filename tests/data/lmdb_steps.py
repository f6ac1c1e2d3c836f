"""Kill a process at every step of what it does to an LMDB store.

Run by the tests as ``python lmdb_steps.py VERB PATH STRIDE WRITE_MAP``.

A step is a line of ``kvtiers/data/lmdb_*.py`` that the process is about to run. Every child is
forked before the store is opened, and before there is any thread. Prints how many were killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from lmdb_box import MIB, Box, key_of, settings_of

from kvtiers.data import lmdb_check
from kvtiers.data.lmdb_files import DATA, SET_ASIDE, read_state
from kvtiers.data.lmdb_registry import REGISTRY
from kvtiers.data.lmdb_settings import WriteMap
from kvtiers.model.outcome import Outcome

CAPACITY = MIB
WRITE_MAP = WriteMap(sys.argv[4] if len(sys.argv) > 4 else "auto")
NUMBERS = tuple(range(20))  # of frames that must outlive everything
WATCHED = os.sep + os.path.join("kvtiers", "data", "lmdb_")


def open_and_close(path: Path) -> None:
    REGISTRY.release(REGISTRY.acquire(settings_of(path, CAPACITY, write_map=WRITE_MAP)))


def grow(path: Path) -> None:
    env = REGISTRY.acquire(settings_of(path, CAPACITY, write_map=WRITE_MAP))
    env.grow(3 * CAPACITY)
    REGISTRY.release(env)


def in_child(action: Callable[[], object]) -> int:
    """Run something in a child process; returns its exit status, negative if it was killed."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:  # noqa: BLE001 - it must not run on as the parent
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at(step: int, action: Callable[[Path], None], path: Path) -> bool:
    """Run something that is killed before its n-th step; returns whether it came so far."""
    left = step

    def watch(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if WATCHED not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return watch

    def traced() -> None:
        sys.settrace(watch)
        action(path)

    code = in_child(traced)
    if code not in (0, -signal.SIGKILL):
        raise SystemExit(f"step {step} ended with {code}")
    return code != 0


def prove(path: Path, *numbers: int) -> None:
    """Open a store as the next process does: nothing is lost, and everything works."""
    box = Box(settings_of(path, CAPACITY, write_map=WRITE_MAP))
    try:
        if numbers:
            assert box.get(*numbers) == [Outcome.OK] * len(numbers)
        assert box.put(1000) == [Outcome.OK]
        assert {key_of(1000), *map(key_of, numbers)} <= box.held()
    finally:
        box.close()
    assert not (path / SET_ASIDE).exists()
    state = read_state(path)
    assert state is not None
    assert state.clean
    assert (path / DATA).stat().st_size == state.map_nbytes
    lmdb_check.check(path)
    known = {DATA, "lock.mdb", "state.json", "users.lock", "door.lock"}
    assert {file.name for file in path.iterdir()} <= known


def at_steps(
    action: Callable[[Path], None], path: Path, stride: int, numbers: tuple[int, ...] = ()
) -> int:
    """Kill an action at each of its steps, or each so-many-th; returns how many there were."""
    origin = path.with_suffix(".origin")
    if numbers and in_child(
        lambda: Box(settings_of(origin, CAPACITY, write_map=WRITE_MAP)).put(*numbers)
    ):
        raise SystemExit("cannot make the store")
    kills, step = 0, 0
    while True:
        shutil.rmtree(path, ignore_errors=True)
        if numbers:
            shutil.copytree(origin, path)
        killed = killed_at(step, action, path)
        if in_child(lambda: prove(path, *numbers)):
            raise SystemExit(f"what {action.__name__} left at step {step} is not good")
        if not killed:
            return kills
        kills += 1
        step += stride


VERBS: dict[str, tuple[Callable[[Path], None], tuple[int, ...]]] = {
    "create": (open_and_close, ()),
    "reopen": (open_and_close, NUMBERS),
    "grow": (grow, NUMBERS),
}

if __name__ == "__main__":
    action, numbers = VERBS[sys.argv[1]]
    print(at_steps(action, Path(sys.argv[2]), int(sys.argv[3]), numbers), flush=True)
