"""Looking after a file store beside its owner, and being killed while doing so."""

import signal
import subprocess
import sys
import time

import pytest
from admin_boxes import held, quiet, rank_of, slab_of, slot_of, write_at
from store_boxes import FileBox, OwningProcess, stopped_store

from kvtiers.data.file_orders import ORDER, Order, Verb, leave_order
from kvtiers.data.store_admin import find_stores
from kvtiers.model.errors import StoreError
from kvtiers.model.outcome import Outcome
from kvtiers.testing.store_suite import SLOT_NBYTES

pytestmark = pytest.mark.filterwarnings("error")

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
    assert box.get(1) == [Outcome.OK]
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
