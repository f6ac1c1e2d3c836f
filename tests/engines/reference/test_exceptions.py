"""What kvtiers raises by mistake reaches whoever drives the engine, which can still be closed."""

import threading

import pytest

from kvtiers.connector.scheduler import SchedulerConnector
from kvtiers.connector.worker import WorkerConnector
from kvtiers.cost.preempt import PreemptMode
from kvtiers.engines.reference import connect
from kvtiers.engines.reference.one_request import OneRequestEngine, OneRequestSettings
from kvtiers.engines.reference.torch_runner import torch_engine
from kvtiers.model.errors import ProtocolError

from .engines import engine_of, request_of, run, tiers_of
from .engines import settings_of as small_settings
from .test_torch_engine import new_requests, prompts, serve, settings_of
from .test_torch_machine import MODEL, config_of, generated

SCHEDULER_SIDE = (
    "arrived",
    "prefetch",
    "reloadable",
    "allocated",
    "preemption",
    "schedule",
    "reported",
    "step_took",
    "step_ended",
    "finished",
)
WORKER_SIDE = ("begin_step", "load_in_step", "end_step", "take_loaded", "take_report")


def breaking(monkeypatch, side, method, num_calls):
    """Make a method raise once it was called so many times."""
    left = [num_calls]
    real = getattr(side, method)

    def called(*args, **more):
        left[0] -= 1
        if left[0] < 0:
            raise ProtocolError("it is broken")
        return real(*args, **more)

    monkeypatch.setattr(side, method, called)


@pytest.mark.parametrize("num_calls", [0, 1])
@pytest.mark.parametrize("method", SCHEDULER_SIDE + WORKER_SIDE)
def test_an_engine_of_which_a_part_raised_can_be_closed(monkeypatch, tmp_path, method, num_calls):
    """Its store is whole and free for the next one, and no thread is left."""
    settings = settings_of(16, preemption=PreemptMode.SWAP)
    config = config_of(tmp_path, "nvme")
    num_threads = threading.active_count()
    engine = torch_engine(MODEL, settings, config)
    side = engine.runner.connector if method in SCHEDULER_SIDE else engine.runner.worker
    with monkeypatch.context() as broken:
        breaking(broken, side, method, num_calls)
        with pytest.raises(ProtocolError, match="it is broken"):
            serve(engine, new_requests())
        engine.close()
        engine.close()
    assert threading.active_count() == num_threads
    after = torch_engine(MODEL, settings, config)
    try:
        tokens, _ = serve(after, new_requests())
    finally:
        after.close()
    assert tokens == {request.request_id: generated(request) for request in new_requests()}


@pytest.mark.parametrize("method", SCHEDULER_SIDE)
def test_so_can_a_modelled_one(monkeypatch, method):
    knobs = small_settings(18, watermark=0.0, preemption=PreemptMode.SWAP)
    engine = engine_of(knobs, tiers_of("nvme"))
    breaking(monkeypatch, engine.runner.connector, method, 2)

    def drive():
        for idx in range(3):
            engine.add(request_of(f"r{idx}", 20, 40))
        run(engine)

    with pytest.raises(ProtocolError, match="it is broken"):
        drive()
    engine.close()
    engine.close()


def test_what_an_abort_and_a_reset_raise_is_not_lost_either(monkeypatch):
    for method, do in (("finished", lambda it: it.abort("r")), ("reset", lambda it: it.reset())):
        engine = engine_of(config=tiers_of())
        engine.add(request_of("r"))
        engine.step()
        breaking(monkeypatch, engine.runner.connector, method, 0)
        with pytest.raises(ProtocolError, match="it is broken"):
            do(engine)
        engine.close()


@pytest.mark.parametrize("make", ["engine", "runner"])
def test_a_side_that_cannot_be_closed_does_not_keep_the_other_open(monkeypatch, tmp_path, make):
    closed = []
    for side in (SchedulerConnector, WorkerConnector):

        def close(self, real=side.close):
            closed.append(type(self))
            real(self)
            raise ProtocolError("it does not close")

        monkeypatch.setattr(side, "close", close)
    config = config_of(tmp_path, "nvme")
    if make == "engine":
        made = torch_engine(MODEL, settings_of(24), config)
    else:
        made = OneRequestEngine(MODEL, OneRequestSettings(24, 4), config)
    with pytest.raises(ProtocolError, match="it does not close"):
        made.close()
    assert closed == [WorkerConnector, SchedulerConnector]
    made.close()
    assert len(closed) == 2


def test_ranks_are_closed_where_the_scheduler_refuses_them(monkeypatch, tmp_path):
    class Refusing(SchedulerConnector):
        def connect(self, hellos, lasting=None):
            raise ProtocolError("ranks disagree")

    num_threads = threading.active_count()
    config = config_of(tmp_path, "nvme")
    with monkeypatch.context() as broken:
        broken.setattr(connect, "SchedulerConnector", Refusing)
        with pytest.raises(ProtocolError, match="ranks disagree"):
            torch_engine(MODEL, settings_of(24), config)
    assert threading.active_count() == num_threads
    runner = OneRequestEngine(MODEL, OneRequestSettings(40, 4), config)
    try:
        assert runner.generate(prompts()[0], 3).token_ids
    finally:
        runner.close()
