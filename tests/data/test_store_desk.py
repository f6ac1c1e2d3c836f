"""What the links of stores are said to have done, where batches are at work together."""

from __future__ import annotations

import pytest

from kvtiers.data.link_meter import LinkMeter
from kvtiers.data.store import FrameRef, StoreAnswer, StoreTicket
from kvtiers.data.store_desk import StoreDesk, Storing
from kvtiers.model.keys import StoreKey
from kvtiers.model.messages import Link
from kvtiers.model.outcome import Outcome
from kvtiers.testing.fake_rank import FakeClock


class Scripted:
    """A store that answers what a test says."""

    def __init__(self):
        self.num = 0
        self.answers = []

    def get(self, frames):
        self.num += 1
        return StoreTicket(self.num)

    put = get

    def poll(self):
        answers, self.answers = self.answers, []
        return answers


@pytest.fixture
def at():
    """A desk with one store, and a way to move it on."""

    class At:
        def __init__(self):
            self.clock, self.store, self.meter = FakeClock(), Scripted(), LinkMeter()
            self.desk = StoreDesk({"s": self.store}, self.meter, self.clock)

        def submit(self, *sizes, writes=False):
            sizes = sizes or (1000,)
            rows = tuple(range(len(sizes)))
            frames = tuple(FrameRef(StoreKey(bytes(32)), row, sizes[row]) for row in rows)
            self.desk.submit(Storing("s", None, rows, frames, writes))

        def answer(self, ticket, seconds, *outcomes, **more):
            outcomes = outcomes or (Outcome.OK,)
            self.store.answers.append(StoreAnswer(StoreTicket(ticket), outcomes, seconds, **more))

        def links(self):
            list(self.desk.answers())
            return {link.name: (link.num_blocks, link.seconds) for link in self.meter.take()}

    return At()


def test_batches_beside_each_other_count_the_time_once(at):
    for _ in range(4):
        at.submit()
    for ticket in range(1, 5):
        at.clock.advance(1.0)
        at.answer(ticket, float(ticket))  # since they were submitted, all at once
    (num, seconds) = at.links()["s>dram"]
    assert (num, seconds) == (4, pytest.approx(4.0))


def test_batches_one_after_another_count_what_they_say(at):
    """Also where both are answered in one poll, later."""
    at.submit()
    at.submit()
    at.clock.advance(10.0)
    at.answer(1, 1.0)
    at.answer(2, 2.0)
    assert at.links()["s>dram"] == (2, pytest.approx(3.0))


def test_time_before_a_batch_is_not_the_next_one_s(at):
    at.submit()
    at.clock.advance(1.0)
    at.answer(1, 1.0)
    assert at.links()["s>dram"] == (1, pytest.approx(1.0))
    at.clock.advance(100.0)
    at.submit()
    at.clock.advance(0.5)
    at.answer(2, 0.4)
    assert at.links()["s>dram"] == (1, pytest.approx(0.4))


def test_the_two_directions_count_apart(at):
    at.submit()
    at.submit(writes=True)
    at.clock.advance(1.0)
    at.answer(1, 1.0)
    at.answer(2, 1.0)
    assert at.links() == {"s>dram": (1, pytest.approx(1.0)), "dram>s": (1, pytest.approx(1.0))}


def test_frames_that_were_held_are_not_copied_bytes(at):
    """The time is all of the batch's: what was held took next to nothing of it."""
    at.submit(100, 20, 3, writes=True)
    at.clock.advance(1.0)
    at.answer(1, 0.5, *(Outcome.OK,) * 3, held=frozenset({0, 2}))
    list(at.desk.answers())
    assert at.meter.take() == (Link("dram>s", 1, 20, 0.5),)


@pytest.mark.parametrize(
    "nothing",
    [{"held": frozenset({0})}, {"outcomes": (Outcome.FULL,)}, {"outcomes": (Outcome.FAILED,)}],
)
def test_batch_that_wrote_nothing_measures_nothing_and_takes_nobodys_time(at, nothing):
    at.submit(writes=True)
    at.submit(writes=True)
    at.clock.advance(1.0)
    at.store.answers.append(
        StoreAnswer(
            **({"ticket": StoreTicket(1), "outcomes": (Outcome.OK,), "seconds": 0.9} | nothing)
        )
    )
    assert at.links() == {}
    at.answer(2, 1.0)
    assert at.links() == {"dram>s": (1, pytest.approx(1.0))}


def test_read_has_no_frames_that_were_held(at):
    at.submit()
    at.clock.advance(1.0)
    at.answer(1, 0.5, held=frozenset({0}))
    assert at.links() == {"s>dram": (1, pytest.approx(0.5))}
