"""What the device has yet to compute, and in which step a prompt's first token comes."""

from __future__ import annotations

import pytest

from kvtiers.connector.backlog import Backlog
from kvtiers.cost.prefill import FALLBACK_SHAPE, PrefillModel

SPEED = PrefillModel(0.005, 5e14, FALLBACK_SHAPE, 2048)


def test_backlog_is_what_admitted_prompts_have_left():
    backlog = Backlog()
    backlog.admitted("a", 4096, 0, loading=False)
    backlog.admitted("b", 1000, 512, loading=False)
    whole = float(SPEED.seconds(4096)) + float(SPEED.seconds(488, 512))
    assert backlog.seconds(SPEED) == pytest.approx(whole)
    backlog.scheduled({"a": 2048, "decoding": 77})
    rest = float(SPEED.seconds(2048, 2048)) + float(SPEED.seconds(488, 512))
    assert backlog.seconds(SPEED) == pytest.approx(rest)
    backlog.left("b")
    backlog.scheduled({"a": 4096})
    assert backlog.seconds(SPEED) == 0.0


def test_prompt_that_loads_is_no_work_for_the_device_until_it_is_there():
    backlog = Backlog()
    backlog.admitted("a", 1000, 800, loading=True)
    assert backlog.seconds(SPEED) == 0.0
    backlog.loaded("a", 160)
    assert backlog.seconds(SPEED) == pytest.approx(float(SPEED.seconds(360, 640)))


def test_engine_computes_while_a_request_of_its_last_step_lives():
    backlog = Backlog()
    assert not backlog.now(SPEED).computes
    backlog.admitted("a", 64, 0, loading=False)
    backlog.scheduled({"a": 64})
    assert backlog.now(SPEED).computes
    backlog.left("a")
    assert not backlog.now(SPEED).computes
    backlog.scheduled({"b": 3})
    backlog.scheduled({})
    assert not backlog.now(SPEED).computes, "a step without tokens"


def test_last_token_is_computed_though_all_are_loaded():
    backlog = Backlog()
    backlog.admitted("a", 64, 64, loading=False)
    assert backlog.seconds(SPEED) == pytest.approx(float(SPEED.seconds(1, 63)))


def test_first_token_comes_with_the_end_of_the_step_that_computes_the_last_of_the_prompt():
    backlog = Backlog()
    backlog.admitted("a", 100, 0, loading=False)
    backlog.admitted("b", 100, 0, loading=False)
    backlog.scheduled({"a": 60})
    backlog.scheduled({"a": 100, "b": 40})
    backlog.scheduled({})  # a step without tokens may end unseen
    backlog.scheduled({"a": 101, "b": 100})
    assert backlog.awaits("a")
    assert backlog.awaits("b")
    assert [list(backlog.step_ended()) for _ in range(3)] == [[], ["a"], ["b"]]
    assert not backlog.awaits("a")


def test_engine_that_never_tells_of_its_steps_costs_bounded_memory():
    backlog = Backlog()
    for i in range(10_000):
        backlog.admitted(str(i), 10, 0, loading=False)
        backlog.scheduled({str(i): 10})
    assert not backlog.awaits("0")
    assert backlog.awaits("9999")


def test_requests_wait_until_they_are_admitted_and_again_after_a_preemption():
    backlog = Backlog()

    def num_waiting() -> int:
        return backlog.now(SPEED).num_waiting

    for name in "abcd":
        backlog.arrived(name)
    backlog.arrived("a")  # said twice
    assert num_waiting() == 4
    backlog.admitted("a", 64, 0, loading=False)
    backlog.scheduled({"a": 64, "b": 64})  # b without a question
    assert num_waiting() == 2
    backlog.left("c")  # aborted in the queue
    assert num_waiting() == 1
    backlog.left("a", waits_again=True)
    assert num_waiting() == 2
    backlog.left("a")
    backlog.left("d")
    assert num_waiting() == 0
