"""Who waits is served in order; who gave way stands before all of its equals."""

import pytest

from kvtiers.engines.reference.queues import RequestQueue
from kvtiers.engines.reference.requests import Request, State
from kvtiers.engines.reference.settings import Policy

from .engines import request_of


def requests_of(*names, **more):
    return [Request(request_of(name, **more), []) for name in names]


def names(queue):
    assert [queue[idx] for idx in range(len(queue))] == list(queue)
    return "".join(request.request_id for request in queue)


@pytest.mark.parametrize("policy", Policy)
def test_who_gave_way_last_comes_first(policy):
    """The last that gave way is the oldest of them: the newest goes first."""
    queue = RequestQueue(policy)
    a, b, c, d, e = requests_of(*"abcde")
    for request in (a, b):
        queue.append(request)
    for request in (c, d):
        queue.put_back(request)
    queue.append(e)
    assert names(queue) == "dcabe"
    queue.remove(c)
    queue.remove(a)
    assert names(queue) == "dbe"
    queue.put_back(a)
    assert names(queue) == "adbe"


def test_priority_comes_before_the_order_of_arrival():
    queue = RequestQueue(Policy.PRIORITY)
    (low,), (high,) = requests_of("l", priority=1), requests_of("h", priority=0)
    queue.append(low)
    queue.append(high)
    assert names(queue) == "hl"
    queue.remove(low)
    queue.put_back(low)
    assert names(queue) == "hl"


def test_without_priority_it_says_nothing():
    queue = RequestQueue(Policy.FCFS)
    for request in (*requests_of("l", priority=1), *requests_of("h", priority=0)):
        queue.append(request)
    assert names(queue) == "lh"


def test_under_priority_a_swapped_one_comes_before_all_that_hold_nothing_below():
    queue = RequestQueue(Policy.PRIORITY)
    (low,), (high,), (again,) = (
        requests_of(name, priority=p) for name, p in (("l", 1), ("h", 0), ("a", 0))
    )
    queue.append(high)
    low.state = State.SWAPPED
    queue.put_back(low)
    queue.put_back(again)
    assert names(queue) == "lah"
