"""Requests are served when they come, and time passes while none is there."""

from itertools import pairwise

import pytest

from kvtiers.engines.reference.serving import OpenLoop, drive

from .engines import SLOW, engine_of, hashes_of, request_of, run, settings_of, tiers_of


def test_requests_come_at_their_times_however_busy_the_engine_is():
    engine = engine_of()
    times = {"a": 0.0, "b": 0.0, "c": 0.02, "late": 100.0}
    requests = [request_of(name, 20, 30, arrived_at=at) for name, at in times.items()]
    reports = list(drive(engine, OpenLoop(requests)))
    admitted = {name: report.started_at for report in reports for name in report.admitted}
    assert admitted["a"] == 0.0
    assert times["c"] <= admitted["c"] < reports[-1].started_at - 90
    assert admitted["late"] == pytest.approx(100.0)
    assert all(report.num_tokens for report in reports)  # none is spent on waiting
    served = [it.request_id for report in reports for it in report.finished]
    assert sorted(served) == sorted(times)
    assert engine.num_unfinished == 0


class ThreeInARow:
    """The next one comes once the last one has ended."""

    def __init__(self):
        self.names, self.next_at = ["a", "b", "c"], 0.0

    def take(self, now):
        if self.next_at is None or self.next_at > now:
            return []
        at, self.next_at = self.next_at, None
        return [request_of(self.names.pop(0), arrived_at=at)]

    def ended(self, at):
        self.next_at = at if self.names else None


def test_a_closed_loop_goes_on_with_what_has_ended():
    engine, arrivals, served = engine_of(), ThreeInARow(), []
    for report in drive(engine, arrivals):
        assert report.gauges.num_running <= 1
        for it in report.finished:
            served.append(it)
            arrivals.ended(it.finished_at + 1.0)
    assert [it.request_id for it in served] == ["a", "b", "c"]
    gaps = [b.arrived_at - a.finished_at for a, b in pairwise(served)]
    assert gaps == pytest.approx([1.0, 1.0])
    assert all(it.admitted_at == pytest.approx(it.arrived_at) for it in served)


def test_who_comes_while_others_wait_for_a_load_is_admitted_at_once():
    engine = engine_of(settings_of(), tiers_of(mode="always"), **SLOW)
    hashes = hashes_of(0, 10)
    engine.add(request_of("first", 40, 1, block_hashes=hashes))
    run(engine)
    engine.settle()
    engine.pool.forget_all()
    begins = engine.now
    loads = request_of("loads", 40, 1, block_hashes=hashes, arrived_at=begins)
    comes = request_of("comes", 8, 1, arrived_at=begins + 0.01)
    reports = list(drive(engine, OpenLoop([loads, comes])))
    admitted = {name: report.started_at for report in reports for name in report.admitted}
    assert admitted["comes"] == pytest.approx(begins + 0.01)
    (loaded,) = (it for report in reports for it in report.finished if it.request_id == "loads")
    assert loaded.first_token_at > begins + 0.05


def test_nobody_who_comes_means_nothing_to_do():
    assert list(drive(engine_of(), OpenLoop([]))) == []
