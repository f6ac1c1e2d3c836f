"""Jobs in processes of their own: remembered, told about, ended, and missed when they die."""

import math
import multiprocessing
import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtiers.model.errors import CapacityError
from kvtiers.simulate.generate import Workload, generate
from kvtiers.simulate.replay_pool import ReplayPool, WorkerError
from kvtiers.simulate.share import Shares

TRACE = generate(Workload("chat", 20))


@dataclass(frozen=True)
class Work:
    """What a test lets be played."""

    name: str
    do: str = "count"

    @property
    def what(self):
        return f"work {self.name}"

    @property
    def kind(self):
        return None

    def run(self, shares, progress):
        if self.do.startswith("after "):  # what another job writes, and a while
            while not Path(self.do.removeprefix("after ")).exists():
                time.sleep(0.01)
            time.sleep(1.0)
        if self.do.startswith("die and write "):
            Path(self.do.removeprefix("die and write ")).touch()
            os._exit(7)
        if self.do.startswith("fail and write "):
            Path(self.do.removeprefix("fail and write ")).touch()
            raise CapacityError(f"{self.name} is too large")
        if self.do == "die":
            os._exit(7)
        if self.do == "break":
            raise ZeroDivisionError(f"{self.name} has a defect")
        if self.do == "fail":
            raise CapacityError(f"{self.name} is too large")
        if self.do == "sleep":
            time.sleep(600)
        for ended in range(3):
            progress(ended + 1, 3)
        return self.name, os.getpid(), len(shares.of(2).requests)


@pytest.fixture(params=[1, 2])
def num_jobs(request):
    return request.param


@pytest.fixture
def make():
    """Makes pools, and sees that nothing is left of them."""
    made = []

    def pool(num_jobs, seconds=math.inf, told=None):
        deadline = time.monotonic() + seconds
        shares = Shares(TRACE)
        made.append(
            ReplayPool(shares, num_jobs, deadline, told or (lambda _what: lambda *_at: None))
        )
        return made[-1]

    yield pool
    for one in made:
        one.close()
    assert multiprocessing.active_children() == []


def test_a_job_gets_the_trace_and_is_played_once(make, num_jobs):
    pool = make(num_jobs)
    name, pid, num_requests = pool.result(Work("a"))
    assert (name, num_requests) == ("a", len(Shares(TRACE).of(2).requests))
    assert (pid == os.getpid()) == (num_jobs == 1)
    begun = time.monotonic()
    assert pool.result(Work("a")) == (name, pid, num_requests)
    assert time.monotonic() - begun < 0.5


def test_idle_cores_play_what_is_likely(make):
    pool = make(2)
    pids = {pool.result(Work("a"), [Work("b")])[1], pool.result(Work("b"))[1]}
    assert len(pids) == 2


def test_what_is_likely_makes_room_for_what_is_wanted(make):
    pool = make(2)
    assert pool.result(Work("a"), [Work("b", "sleep")])[0] == "a"
    assert pool.result(Work("c"), [Work("b", "sleep"), Work("d", "sleep")])[0] == "c"
    assert pool.first([Work("e"), Work("f")]) in {
        Work("e"),
        Work("f"),
    }  # what sleeps is of no use any more
    assert [pool.result(Work(name))[0] for name in "ef"] == ["e", "f"]


def test_what_is_given_up_is_told(make):
    seen = []

    def told(what):
        return lambda ended, num: seen.append((what, ended, num))

    pool = make(2, told=told)
    pool.result(Work("a"), [Work("b", "sleep")])
    pool.close()
    assert seen[-1] == ("work b", 0, 0)


def test_progress_is_told(make, num_jobs):
    seen = []

    def told(what):
        return lambda ended, num: seen.append((what, ended, num))

    make(num_jobs, told=told).result(Work("a"))
    assert seen[-1] == ("work a", 3, 3)


def test_what_a_job_raises_is_raised_here(make, num_jobs):
    with pytest.raises(CapacityError, match="a is too large"):
        make(num_jobs).result(Work("a", "fail"))


def test_a_process_that_dies_is_an_error_that_says_so(make):
    pool = make(2)
    with pytest.raises(WorkerError, match=r"died \(exit code 7\) while it played: work a"):
        pool.result(Work("a", "die"))


def test_a_defect_in_a_process_is_told(make):
    with pytest.raises(WorkerError, match="work a: ZeroDivisionError: a has a defect"):
        make(2).result(Work("a", "break"))


@pytest.mark.parametrize("how", ["die", "fail"])
def test_what_nobody_wanted_ends_nothing_and_is_tried_again_once_it_is_wanted(make, tmp_path, how):
    pool, mark = make(2), tmp_path / "mark"
    unlikely = Work("b", f"{how} and write {mark}")
    assert pool.result(Work("a", f"after {mark}"), [unlikely])[0] == "a"
    assert pool.result(Work("c"), [unlikely])[0] == "c"
    assert unlikely not in pool.spent
    with pytest.raises((CapacityError, WorkerError)):
        pool.result(unlikely)


def test_only_the_first_job_begins_when_time_is_up(make, num_jobs):
    pool = make(num_jobs, seconds=0.0)
    assert pool.result(Work("a"), [Work("b")]) is not None
    assert pool.result(Work("c")) is None


def test_closing_ends_what_is_at_work(make):
    pool = make(2)
    pool.result(Work("a"), [Work("b", "sleep")])
    assert multiprocessing.active_children()
    begun = time.monotonic()
    pool.close()
    assert multiprocessing.active_children() == []
    assert time.monotonic() - begun < 10
