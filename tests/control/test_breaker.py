"""When a medium that fails is left alone, and when it is tried again."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtiers.control.breaker import (
    FIRST_BACKOFF_SECONDS,
    MAX_BACKOFF_SECONDS,
    NUM_FAILURES,
    Breaker,
    BreakerState,
)


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(NUM_FAILURES):
        breaker.failed(now)
    assert breaker.state is BreakerState.OPEN
    return breaker


def open_seconds(breaker: Breaker, now: float) -> float:
    """How long an open breaker stays so, to a tenth of a second."""
    tenths = 0
    while breaker.state is BreakerState.OPEN:
        tenths += 1
        breaker.tick(now + tenths / 10)
    return tenths / 10


@given(st.lists(st.sampled_from(["succeeds", "fails", "hangs"]), max_size=60))
def test_it_opens_only_after_failures_in_a_row_and_a_hang_counts_double(fates):
    breaker = Breaker()
    in_a_row = 0
    for fate in fates:
        if fate == "succeeds":
            breaker.succeeded()
            in_a_row = 0
        elif fate == "fails":
            breaker.failed(0.0)
            in_a_row += 1
        else:
            breaker.hung(0.0)
            in_a_row += 2
        assert breaker.closed == (in_a_row < NUM_FAILURES)
        if not breaker.closed:
            return


def test_backoff_doubles_with_each_failed_probe_and_is_bounded():
    breaker, now, waits = opened(), 0.0, []
    for _ in range(9):
        seconds = open_seconds(breaker, now)
        waits.append(seconds)
        now += seconds
        assert breaker.wants_probe
        breaker.probe()
        assert not breaker.wants_probe
        breaker.probe_failed(now)
    assert waits[0] == FIRST_BACKOFF_SECONDS
    assert all(b == min(2 * a, MAX_BACKOFF_SECONDS) for a, b in itertools.pairwise(waits))
    assert waits[-1] == MAX_BACKOFF_SECONDS


def test_a_medium_that_fails_right_after_its_probe_is_left_alone_for_longer():
    breaker = opened()
    breaker.tick(FIRST_BACKOFF_SECONDS)
    breaker.probe()
    breaker.probe_succeeded()
    assert breaker.closed
    breaker.failed(10.0)
    assert open_seconds(breaker, 10.0) == 2 * FIRST_BACKOFF_SECONDS


def test_a_medium_that_has_proved_itself_starts_anew():
    breaker = opened()
    breaker.tick(FIRST_BACKOFF_SECONDS)
    breaker.probe()
    breaker.probe_succeeded()
    for _ in range(NUM_FAILURES):
        breaker.succeeded()
    breaker.failed(10.0)
    assert breaker.closed
    for _ in range(NUM_FAILURES - 1):
        breaker.failed(10.0)
    assert open_seconds(breaker, 10.0) == FIRST_BACKOFF_SECONDS


def test_a_probe_that_shows_nothing_is_repeated():
    breaker = opened()
    breaker.tick(FIRST_BACKOFF_SECONDS)
    breaker.probe()
    breaker.probe_said_nothing()
    assert breaker.wants_probe


class BreakerMachine(RuleBasedStateMachine):
    """Answers come late, in any order with time and probes."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker()
        self.now = 0.0
        self.opened_at = 0.0

    @rule(seconds=st.sampled_from([0.1, 1.0, 30.0, 100.0]))
    def wait(self, seconds):
        self.now += seconds
        was, open_for = self.breaker.state, self.now - self.opened_at
        self.breaker.tick(self.now)
        if open_for < FIRST_BACKOFF_SECONDS - 1e-6:  # of rounding
            assert self.breaker.state is was, "tried before its back-off was over"
        if open_for >= MAX_BACKOFF_SECONDS:
            assert self.breaker.state is not BreakerState.OPEN, "never tried again"

    @rule(ok=st.booleans())
    def work_ends(self, ok):
        was = self.breaker.state
        self.breaker.succeeded() if ok else self.breaker.failed(self.now)
        if was is not BreakerState.CLOSED:
            assert self.breaker.state is was, "what was asked before says nothing"
        self._note(was)

    @precondition(lambda self: self.breaker.wants_probe)
    @rule()
    def probe(self):
        self.breaker.probe()

    @precondition(lambda self: self.breaker.probing)
    @rule(verdict=st.sampled_from([True, False, None]))
    def probe_ends(self, verdict):
        was = self.breaker.state
        if verdict is None:
            self.breaker.probe_said_nothing()
            assert self.breaker.wants_probe
        elif verdict:
            self.breaker.probe_succeeded()
            assert self.breaker.closed
        else:
            self.breaker.probe_failed(self.now)
            assert self.breaker.state is BreakerState.OPEN
        self._note(was)

    @invariant()
    def one_probe_and_only_when_half_open(self):
        assert not self.breaker.probing or self.breaker.state is BreakerState.HALF_OPEN
        assert not (self.breaker.probing and self.breaker.wants_probe)

    def _note(self, was):
        if self.breaker.state is BreakerState.OPEN and was is not BreakerState.OPEN:
            self.opened_at = self.now


TestBreaker = BreakerMachine.TestCase
TestBreaker.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
