"""What a worker's side says of loads: between steps, in a step, failed and malformed."""

from __future__ import annotations

import logging
import threading
import time

import pytest
from workers import OK, SOON, A, B, C, D, held, stores

from kvtiers.model.errors import ProtocolError
from kvtiers.model.messages import (
    DRAM,
    HBM,
    Forget,
)
from kvtiers.model.outcome import Outcome
from kvtiers.testing.fake_rank import keys_of


def test_asynchronous_load_is_reported_exactly_once(worker):
    keys = worker.offloaded(0, 1)
    order = worker.rank.orders.reload(keys, [5, 6], [0, 1])
    loaded = [worker.step(before=(order,)), worker.settle(), worker.step(), worker.settle()]
    assert [each.request_ids for each in loaded if each.request_ids] == [{order.request_id}]
    assert all(map(worker.rank.holds, [5, 6], keys))


def test_load_that_runs_over_several_steps_is_reported_when_it_is_over(make_worker):
    worker = make_worker(make_stores=held)
    order = worker.rank.orders.reload([A], [5], sources=1, window=[4])
    assert worker.step(before=(order,)).request_ids == set()
    assert worker.step().request_ids == set()
    deadline = time.monotonic() + SOON
    while not worker.rank.stores["m"].release():
        assert time.monotonic() < deadline
    loaded = worker.settle()
    assert loaded.request_ids == loaded.failed_requests == {order.request_id}
    assert loaded.failed_blocks == {5}
    assert worker.step().request_ids == set()


def test_failed_blocks_are_named(worker):
    keys = worker.offloaded(0, 1, 2)
    order = worker.rank.orders.reload([keys[0], D, keys[2]], [5, 6, 7], [0, 1, 2])
    during, after = worker.step(before=(order,)), worker.settle()
    assert worker.outcomes(order) == {HBM: [OK, Outcome.STALE, OK]}
    assert during.failed_blocks | after.failed_blocks == {6}


def test_failures_of_all_loads_of_a_step_are_told_together(worker):
    good = worker.offloaded(0)
    orders = [
        worker.rank.orders.reload(good, [4], [0]),
        worker.rank.orders.reload([B], [5], [1]),
        worker.rank.orders.reload([C], [6], [2]),
    ]
    worker.connector.begin_step(worker.orders(before=tuple(orders)))
    assert worker.thread.wait_idle(SOON)
    worker.connector.end_step()
    loaded = worker.connector.take_loaded()
    assert loaded.request_ids == {order.request_id for order in orders}
    assert loaded.failed_requests == {order.request_id for order in orders[1:]}
    assert loaded.failed_blocks == {5, 6}
    assert worker.connector.take_loaded().failed_blocks == set()


def test_load_in_step_is_there_when_it_returns(worker):
    keys = worker.offloaded(*range(4))
    for _ in range(50):
        worker.rank.fill([4, 5, 6, 7], keys_of(50, 51, 52, 53))
        order = worker.rank.orders.reload(keys, [4, 5, 6, 7], [0, 1, 2, 3])
        worker.connector.begin_step(worker.orders(before=(order,), sync_loads=(order.job_id,)))
        worker.connector.load_in_step()
        assert all(map(worker.rank.holds, [4, 5, 6, 7], keys))
        worker.connector.end_step()
        loaded = worker.connector.take_loaded()
        assert loaded.request_ids == set(), "nobody waits for it between steps"
        assert loaded.failed_blocks == set()


def test_failed_load_in_step_refuses_what_the_step_would_offload(make_worker):
    """It was computed on blocks that never came: on every hop, and no slot is touched."""
    worker = make_worker(make_stores=stores)
    rank = worker.rank
    reload = rank.orders.reload([A], [5], [0])
    offload = rank.orders.offload([B, C], [1, 2], [1, 2])
    offload.targets[:] = [0b10, 0b00]
    before = bytes(rank.slab.view(1))
    loaded = worker.step(before=(reload,), sync_loads=(reload.job_id,), after=(offload,))
    assert loaded.failed_blocks == {5}
    assert loaded.request_ids == loaded.failed_requests == set()
    worker.settle()
    failed = [Outcome.FAILED] * 2
    assert worker.outcomes(offload) == {DRAM: failed, "n": failed}
    answers = [c for c in worker.report.completions if c.job_id == offload.job_id]
    assert [c.last for c in answers] == [False, True]
    assert bytes(rank.slab.view(1)) == before

    again = rank.orders.offload([B], [1], [1])
    worker.step(lambda: rank.fill([1], [B]), after=(again,))
    worker.settle()
    assert worker.outcomes(again) == {DRAM: [OK]}, "the next step offloads again"


def test_failed_asynchronous_load_refuses_nothing(worker):
    offload = worker.rank.orders.offload([B], [1], [1])
    worker.step(before=(worker.rank.orders.reload([A], [5], [0]),), after=(offload,))
    worker.settle()
    assert worker.outcomes(offload) == {DRAM: [OK]}


def test_forward_pass_over_a_load_that_nobody_ordered_is_refused(worker):
    """Wrong tokens are worse than no tokens."""
    with pytest.raises(ProtocolError, match="77"):
        worker.connector.begin_step(worker.orders(sync_loads=(77,)))


# Malformed orders


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_forward_pass_over_a_load_whose_thread_has_died_is_refused(make_worker, monkeypatch):
    """It would compute on blocks that nobody loaded."""
    worker = make_worker()
    died = threading.Event()

    def die() -> bool:
        died.set()
        raise SystemExit

    monkeypatch.setattr(worker.rank.executor, "advance", die)
    load = worker.rank.orders.reload([A], [0], [0])
    worker.connector.begin_step(worker.orders(before=(load,), sync_loads=(load.job_id,)))
    assert died.wait(SOON)
    with pytest.raises(ProtocolError, match="executor stopped"):
        worker.connector.load_in_step()


def test_malformed_orders_come_back_failed(worker, caplog):
    rank = worker.rank
    reload = rank.orders.reload([A], [5], [99])
    offload = rank.orders.offload([B], [1], [99])
    with caplog.at_level(logging.ERROR):
        loaded = worker.step(
            before=(reload,), after=(offload,), forgets=(Forget.of("nowhere", [A]),)
        )
    assert loaded.request_ids == loaded.failed_requests == {reload.request_id}
    assert loaded.failed_blocks == {5}
    worker.settle()
    assert worker.outcomes(reload) == {HBM: [Outcome.FAILED]}
    assert worker.outcomes(offload) == {DRAM: [Outcome.FAILED]}
    assert all(completion.last for completion in worker.report.completions)
    assert worker.report.counters == {"orders_refused": 3}
    assert "slot 99" in caplog.text


def test_malformed_load_in_step_refuses_what_the_step_would_offload(worker):
    reload = worker.rank.orders.reload([A], [5], [99])
    offload = worker.rank.orders.offload([B], [1], [1])
    loaded = worker.step(before=(reload,), sync_loads=(reload.job_id,), after=(offload,))
    assert loaded.failed_blocks == {5}
    worker.settle()
    assert worker.outcomes(offload) == {DRAM: [Outcome.FAILED]}
