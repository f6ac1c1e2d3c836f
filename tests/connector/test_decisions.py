"""Every decision is recorded with what came of it, and its error is a metric."""

from __future__ import annotations

import json
import random

import pytest

from kvtiers.cost.preempt import PreemptMode
from kvtiers.observe.metrics import PREDICTION_ERROR, PREDICTIONS
from kvtiers.testing.fake_engine import FakeEngine, Setup, prompt_of
from kvtiers.testing.fake_step import EngineSettings, Execution

EXECUTIONS = pytest.mark.parametrize("execution", list(Execution), ids=lambda e: e.name)


def engine_of(execution: Execution, **options: object) -> FakeEngine:
    settings = EngineSettings(execution=execution)
    options = {"cost": {"mode": "always"}, "reload": {"sync_below": "0ms"}, **options}
    return FakeEngine(Setup(settings, options=options), random.Random(0))


def computed_and_reloaded(engine: FakeEngine) -> None:
    """Compute a document, let the engine forget it, and ask for it again."""
    engine.generate(prompt_of(0, 40))
    engine.scheduler.pool.reset_cache()
    engine.generate(prompt_of(0, 40))


@EXECUTIONS
def test_decision_ends_with_the_first_token(execution):
    engine = engine_of(execution)
    computed_and_reloaded(engine)
    (reload,) = [d for d in engine.connector.decisions.finished() if d.num_chosen_blocks]
    assert reload.num_hit_blocks == {"dram": reload.num_chosen_blocks}
    assert set(reload.predicted_seconds) == {"reload", "recompute", "chosen", "load", "auto"}
    assert reload.outcome.num_loaded_blocks == reload.num_chosen_blocks
    assert 0 <= reload.outcome.measured_seconds < reload.outcome.ttft_seconds
    engine.end()


@EXECUTIONS
def test_error_of_load_and_first_token_is_counted(execution):
    engine = engine_of(execution)
    computed_and_reloaded(engine)
    counters = engine.connector.counters
    (reload,) = [d for d in engine.connector.decisions.finished() if d.num_chosen_blocks]
    for what, predicted, measured in (
        ("load", "load", reload.outcome.measured_seconds),
        ("ttft", "chosen", reload.outcome.ttft_seconds),
    ):
        if measured == 0:  # the clock of the test stood still, which says nothing
            assert counters.value(PREDICTIONS, (what, "reload")) == 0
            continue
        error = abs(reload.predicted_seconds[predicted] - measured) / measured
        assert counters.value(PREDICTIONS, (what, "reload")) == 1
        assert counters.value(PREDICTION_ERROR, (what, "reload")) == pytest.approx(error)
    engine.end()


def test_load_in_the_step_is_measured_by_its_first_token_only():
    """It is answered at the end of the step: nobody knows when it was done."""
    engine = engine_of(Execution.SYNC, reload={"sync_below": "10s"})
    computed_and_reloaded(engine)
    (reload,) = [d for d in engine.connector.decisions.finished() if d.num_chosen_blocks]
    assert reload.outcome.num_loaded_blocks == reload.num_chosen_blocks
    assert reload.outcome.measured_seconds is None
    assert reload.outcome.ttft_seconds is not None
    assert engine.connector.counters.value(PREDICTIONS, ("load", "reload")) == 0
    engine.end()


def test_recompute_is_measured_too():
    engine = engine_of(Execution.SYNC, cost={"mode": "never"})
    computed_and_reloaded(engine)
    decision = engine.connector.decisions.finished()[-1]
    assert decision.num_chosen_blocks == 0
    assert decision.outcome.ttft_seconds > 0
    assert engine.connector.counters.value(PREDICTIONS, ("ttft", "recompute")) == 1
    engine.end()


def test_aborted_request_leaves_no_open_decision(tmp_path):
    log = tmp_path / "decisions.jsonl"
    engine = engine_of(Execution.SYNC, cost={"mode": "always", "decision_log": str(log)})
    engine.generate(prompt_of(0, 40))
    engine.scheduler.pool.reset_cache()
    request = engine.add(prompt_of(0, 40), 3)
    engine.step()
    assert engine.connector.decisions.open_decision(request.request_id) is not None
    engine.step(abort=[request.request_id])
    engine.drain()
    assert engine.connector.decisions.open_decision(request.request_id) is None
    (line,) = log.read_text().splitlines()
    assert json.loads(line)["outcome"]["ttft_seconds"] is None
    engine.end()


def test_engine_may_ask_what_to_do_with_a_victim():
    engine = engine_of(Execution.SYNC)
    request = engine.add(prompt_of(0, 40), 8)
    engine.step()
    plan = engine.connector.preemption(request.request_id, 40, mode=PreemptMode.SWAP)
    assert plan.swap
    assert plan.swap_cost_seconds > 0
    assert plan.recompute_cost_seconds > 0
    engine.drain()
    engine.end()
