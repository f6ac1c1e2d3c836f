import numpy as np
import pytest

from kvtiers.model.errors import ConfigError
from kvtiers.simulate.arrivals import ArrivalPlan
from kvtiers.simulate.trace import TraceRequest


def request(at, session, think=None):
    return TraceRequest(at, 10, 5, np.zeros(0, np.int64), session, think)


def test_open_loop_keeps_gaps_and_begins_at_zero():
    requests = [request(10.0, 0), request(10.0, 1), request(14.0, 2)]
    arrivals = ArrivalPlan(speed=2.0).of(requests)
    assert arrivals.take(0.0) == [(0, 0.0), (1, 0.0)]
    assert arrivals.next_at == 2.0
    arrivals.ended(0, 1.0)
    assert arrivals.take(1.9) == []
    assert arrivals.take(5.0) == [(2, 2.0)]
    assert arrivals.next_at is None


def test_closed_loop_runs_so_many_sessions_each_one_request_at_a_time():
    requests = [
        request(0.0, 7),
        request(1.0, 8),
        request(2.0, 7, think=4.0),
        request(3.0, 9),
        request(5.0, 7),
    ]
    arrivals = ArrivalPlan(speed=2.0, concurrency=2).of(requests)
    assert arrivals.take(0.0) == [(0, 0.0), (1, 0.0)]
    assert arrivals.next_at is None
    arrivals.ended(1, 3.0)  # session 8 is over: 9 begins
    assert arrivals.take(3.0) == [(3, 3.0)]
    arrivals.ended(0, 10.0)  # 7 goes on when its user has thought
    assert arrivals.next_at == 12.0
    assert arrivals.take(11.9) == []
    assert arrivals.take(12.0) == [(2, 12.0)]
    arrivals.ended(3, 12.5)
    assert arrivals.next_at is None
    arrivals.ended(2, 13.0)
    assert arrivals.take(13.0) == [(4, 13.0)]
    arrivals.ended(4, 14.0)
    assert arrivals.next_at is None


def test_values_without_sense_are_refused():
    with pytest.raises(ConfigError, match=r"a speed of 0\.0 must be above 0"):
        ArrivalPlan(speed=0.0)
    with pytest.raises(ConfigError, match="0 sessions at a time"):
        ArrivalPlan(concurrency=0)


@pytest.mark.parametrize("think", [None, 0.0, 3.0])
@pytest.mark.parametrize("concurrency", [None, 2])
@pytest.mark.parametrize("speed", [1.0, 2.0])
def test_speed_that_would_change_nothing_is_refused(speed, concurrency, think):
    """In a closed loop there is nothing but think times that it could change."""
    plan, requests = ArrivalPlan(speed, concurrency), [request(0.0, 7), request(9.0, 7, think)]
    process, again = plan.of(requests), ArrivalPlan(1.0, concurrency).of(requests)
    for it in (process, again):
        it.take(0.0)
        it.ended(0, 1.0)
    changes = process.next_at != again.next_at
    assert changes == (speed == 2.0 and (concurrency is None or think == 3.0))
    if changes or speed == 1.0:
        plan.check(requests)
        return
    with pytest.raises(ConfigError, match=r"changes nothing .* leave --speed out"):
        plan.check(requests)
