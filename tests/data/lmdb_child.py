"""Processes that use one LMDB store at once: run by the tests as ``python lmdb_child.py VERB ...``.

A nursery forks its children after the imports and before any thread, so that one costs
milliseconds; each then opens the store for itself.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from lmdb_box import MIB, NBYTES, Box, key_of, settings_of

from kvtiers.data.lmdb_registry import REGISTRY
from kvtiers.data.lmdb_settings import Eviction, WriteMap
from kvtiers.model.errors import CapacityError
from kvtiers.model.outcome import Outcome

CAPACITY = 4 * MIB


def put_forever(path: Path, seed: int) -> None:
    """Write frames until killed."""
    box = Box(settings_of(path, CAPACITY))
    turn = 0
    print("ready", flush=True)
    while True:
        number = seed * 1000 + turn % 41 * 24  # more than fit: evicted when their turn comes
        outcomes = box.put(*range(number, number + 24))
        assert set(outcomes) == {Outcome.OK}, outcomes
        turn += 1


def hold(path: Path, number: int) -> None:
    """Write one frame, say so, and keep the store open until killed."""
    box = Box(settings_of(path, CAPACITY))
    print(*(outcome.name for outcome in box.put(number)), flush=True)
    time.sleep(60)


def read_and_hold(path: Path, max_readers: int) -> None:
    """Keep a read transaction open until killed."""
    env = REGISTRY.acquire(settings_of(path, CAPACITY, max_readers=max_readers))
    with env.reading():
        print("ready", flush=True)
        time.sleep(60)


def churn(path: Path, turns: int) -> None:
    """Open, read and close, again and again."""
    settings = settings_of(path, CAPACITY)
    for _ in range(turns):
        env = REGISTRY.acquire(settings)
        with env.reading() as txn:
            assert txn.get(key_of(1), db=env.index) is not None
        REGISTRY.release(env)


def fork_and_read(path: Path, _: int) -> None:
    """A child of a process that has the store open reads for itself; so does the parent after."""
    box = Box(settings_of(path, CAPACITY))
    assert box.get(1) == [Outcome.OK]
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        box.store.close()  # the parent's: nothing happens
        own = Box(settings_of(path, CAPACITY))
        good = own.get(1) == [Outcome.OK]
        own.close()
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert box.get(1) == [Outcome.OK]
    assert box.put(2) == [Outcome.OK]
    box.close()


def disk_full(path: Path, file_nbytes: int) -> None:
    """Write where a file may not grow; the commits fail, and nothing else does."""
    settings = settings_of(path, CAPACITY, eviction=Eviction.NONE, write_map=WriteMap.OFF)
    box = Box(settings)
    assert box.put(1, 2) == [Outcome.OK] * 2
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_nbytes, resource.RLIM_INFINITY))
    outcomes = [outcome for n in range(10, 150, 10) for outcome in box.put(*range(n, n + 10))]
    kept = {key_of(n) for n, o in zip(range(10, 150), outcomes, strict=True) if o is Outcome.OK}
    assert Outcome.FAILED in outcomes
    assert set(outcomes) <= {Outcome.OK, Outcome.FAILED}
    assert box.held() == kept | {key_of(1), key_of(2)}
    assert box.get(1, 2) == [Outcome.OK] * 2
    box.store.delete([key_of(1)])  # takes pages, too: a file that cannot grow may keep the frame
    assert box.get(2, 1)[0] is Outcome.OK
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert set(box.put(*range(200, 230))) == {Outcome.OK}
    box.store.delete([key_of(1)])
    assert box.get(1, 2) == [Outcome.MISSING, Outcome.OK]
    box.store.close()


def commit_and_die(path: Path, _: int) -> None:
    """End by a kill right after a commit of pages that LMDB takes and does not write."""
    box = Box(settings_of(path, CAPACITY, write_map=WriteMap.OFF))
    assert box.put(*range(20)) == [Outcome.OK] * 20
    env = REGISTRY.acquire(settings_of(path, CAPACITY, write_map=WriteMap.OFF))
    txn = env._env.begin(write=True)
    txn.put(key_of(5000), bytes(200_000), db=env.frames)
    txn.delete(key_of(5000), db=env.frames)
    txn.commit()
    os.kill(os.getpid(), signal.SIGKILL)


def live(path: Path, seed: int) -> None:
    """Put, get and delete at random; any answer but a wrong byte or a failure is right."""
    chance = random.Random(seed)
    box = Box(settings_of(path, CAPACITY))
    while True:
        numbers = [chance.randrange(1500) for _ in range(chance.randrange(1, 32))]
        action = chance.random()
        if action < 0.45:
            assert set(box.put(*numbers)) <= {Outcome.OK, Outcome.FULL}
        elif action < 0.93:
            assert set(box.get(*numbers)) <= {Outcome.OK, Outcome.MISSING}
        elif action < 0.98:
            box.store.delete([key_of(n) for n in numbers[:4]])
        else:
            box.close()
            box = Box(settings_of(path, CAPACITY))


def nursery(path: Path, seconds: int) -> None:
    """Keep eight processes alive on one store, kill some, and grow the store half-way.

    Now and then all are killed at once, so that the next one finds itself alone; and those that
    grow the store are killed as well, until one comes through.
    """
    chance = random.Random(1)
    alive: dict[int, int] = {}
    seed = kills = 0
    end = time.monotonic() + seconds
    grown = False
    while time.monotonic() < end:
        while len(alive) < 8:
            seed += 1
            alive[_fork(live, path, seed)] = seed
        time.sleep(chance.uniform(0.0, 0.15))
        victims = list(alive) if chance.random() < 0.05 else [chance.choice(list(alive))]
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
            _reap(victim, alive)
            kills += 1
        for pid in list(alive):
            if os.waitpid(pid, os.WNOHANG)[0]:
                raise SystemExit(f"process {alive[pid]} ended by itself")
        if not grown and end - time.monotonic() < seconds / 2:
            patience = chance.uniform(0.0, 0.05)
            grown = end - time.monotonic() < seconds / 3
            kills += _grow_or_die(path, 30.0 if grown else patience)
    for pid in list(alive):
        os.kill(pid, signal.SIGKILL)
        _reap(pid, alive)
    print(kills, flush=True)


def _grow_or_die(path: Path, seconds: float) -> bool:
    """Grow a store in a process that is killed if it takes longer; returns whether it was."""
    pid = _fork(_grow, path, 0)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            if status:
                raise SystemExit("cannot grow")
            return False
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def compete(path: Path, seconds: int) -> None:
    """Let three processes write as fast as they can; prints how many batches each has written."""
    reading, writing = os.pipe()
    for seed in range(3):
        if os.fork() == 0:
            box = Box(settings_of(path, CAPACITY))
            end, num = time.monotonic() + seconds, 0
            while time.monotonic() < end:
                start = seed * 10_000 + num % 50 * 16
                assert set(box.put(*range(start, start + 16))) == {Outcome.OK}
                num += 1
            os.write(writing, f"{num} ".encode())
            os._exit(0)
    for _ in range(3):
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    print(os.read(reading, 1000).decode(), flush=True)


def kill_writers(path: Path, times: int) -> None:
    """Kill a writer in the middle of its work, again and again."""
    chance = random.Random(2)
    for seed in range(times):
        pid = _fork(put_forever, path, seed)
        time.sleep(chance.uniform(0.02, 0.12))
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            raise SystemExit("a writer ended by itself")


def _grow(path: Path, _: int) -> None:
    env = REGISTRY.acquire(settings_of(path, CAPACITY))
    with suppress(CapacityError):  # one that was killed came as far
        env.grow(3 * CAPACITY)
    REGISTRY.release(env)


def _reap(pid: int, alive: dict[int, int]) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    seed = alive.pop(pid)
    if code != -signal.SIGKILL:
        raise SystemExit(f"process {seed} ended with {code}")


def _fork(verb: object, path: Path, argument: int) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        verb(path, argument)  # type: ignore[operator]
    except BaseException:  # noqa: BLE001 - it must not run on as the nursery
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


VERBS = {
    verb.__name__: verb
    for verb in (
        put_forever,
        hold,
        read_and_hold,
        churn,
        fork_and_read,
        commit_and_die,
        disk_full,
        nursery,
        compete,
        kill_writers,
    )
}

if __name__ == "__main__":
    assert NBYTES == 12_288
    VERBS[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
