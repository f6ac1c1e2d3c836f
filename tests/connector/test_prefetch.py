"""What waits in an engine's queue is brought from stores to DRAM meanwhile."""

from __future__ import annotations

import random

import pytest

from kvtiers.observe.metrics import BLOCKS_PREFETCHED, BLOCKS_RELOADED
from kvtiers.testing.fake_engine import FakeEngine, Setup, prompt_of, random_work
from kvtiers.testing.fake_step import EngineSettings, Execution

ONE_AT_A_TIME = EngineSettings(max_running=1)
ALWAYS = {"cost": {"mode": "always"}, "reload": {"sync_below": "0ms"}}
OFF = {"cost": {"mode": "always"}, "reload": {"sync_below": "0ms", "prefetch": "off"}}
NUM_BLOCKS = 5  # of the prompt that waits; its last token is a block of its own


def with_a_prompt_below_dram(options: dict = ALWAYS, num_ranks: int = 1) -> FakeEngine:
    """An engine whose store alone has the prompt of document 1."""
    setup = Setup(ONE_AT_A_TIME, num_ranks, num_slots=40, store_blocks=200, options=options)
    engine = FakeEngine(setup, random.Random(1))
    for document in range(1, 7):
        engine.generate(prompt_of(document, 45 if document > 1 else 4 * NUM_BLOCKS + 1))
    assert engine.scheduler.pool.reset_cache()
    return engine


def counted(engine: FakeEngine, name: str, *labels: str) -> int:
    return int(engine.connector.counters.value(name, labels))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_prompt_that_waits_is_prefetched_and_comes_from_dram(num_ranks):
    engine = with_a_prompt_below_dram(num_ranks=num_ranks)
    from_store = counted(engine, BLOCKS_RELOADED, "memory")
    engine.add([5] * 9, 12)  # runs for a while, alone
    engine.step()
    engine.add(prompt_of(1, 4 * NUM_BLOCKS + 1), 3)
    engine.drain()
    # The documents' first two blocks are those of the others too, which DRAM has.
    assert 1 <= counted(engine, BLOCKS_PREFETCHED) <= NUM_BLOCKS
    assert counted(engine, BLOCKS_RELOADED, "memory") == from_store
    engine.end()


def test_off_means_off():
    engine = with_a_prompt_below_dram(OFF)
    from_store = counted(engine, BLOCKS_RELOADED, "memory")
    engine.add([5] * 9, 12)
    engine.step()
    engine.add(prompt_of(1, 4 * NUM_BLOCKS + 1), 3)
    engine.drain()
    assert counted(engine, BLOCKS_PREFETCHED) == 0
    assert counted(engine, BLOCKS_RELOADED, "memory") > from_store
    engine.end()


def test_what_hbm_has_is_not_read_from_a_store():
    """R31."""
    engine = with_a_prompt_below_dram()
    prompt = prompt_of(1, 4 * NUM_BLOCKS + 1)
    engine.generate(prompt)
    prefetched = counted(engine, BLOCKS_PREFETCHED)
    engine.connector.controller.dram.reset()
    engine.step()
    engine.add([5] * 9, 12)
    engine.step()
    engine.add(prompt, 3)
    engine.drain()
    assert counted(engine, BLOCKS_PREFETCHED) == prefetched
    engine.end()


def test_a_request_that_is_aborted_while_it_waits_leaves_nothing_held():
    engine = with_a_prompt_below_dram()
    engine.add([5] * 9, 12)
    engine.step()
    for number in range(50):
        request = engine.add(prompt_of(number % 5, 4 * NUM_BLOCKS + 1), 3)
        engine.step(abort=[request.request_id] if number % 2 else ())
        if request.request_id in engine.scheduler.requests:
            engine.scheduler.abort(request.request_id)
    engine.drain()
    assert engine.connector.controller.dram.num_pins == 0
    engine.end()


def test_a_request_that_reloads_nothing_ends_its_wait_when_it_is_admitted():
    """Else its blocks are read while it runs, and count against those that still wait."""
    engine = with_a_prompt_below_dram({**ALWAYS, "policy": {"offload": "lazy"}})
    prompt = prompt_of(1, 4 * NUM_BLOCKS + 1)
    engine.generate(prompt)  # HBM has all of it from now on
    engine.connector.controller.dram.reset()
    engine.step()
    request = engine.add(prompt, 30)
    # As adapters say that cannot tell what HBM has, such as vLLM's with small hash blocks.
    engine.connector.prefetch(request.request_id, request.num_tokens, 0)
    for _ in range(10):
        engine.step()
    assert counted(engine, BLOCKS_PREFETCHED) == 0
    engine.drain()
    engine.end()


@pytest.mark.parametrize("execution", Execution)
@pytest.mark.parametrize("write", ["through", "back"])
def test_long_work_with_a_queue_prefetches_and_is_never_false(execution, write):
    engine = EngineSettings(max_running=2, execution=execution)
    setup = Setup(engine, 2, num_slots=20, store_blocks=90, store={"write": write}, options=ALWAYS)
    prefetched = 0
    for seed in range(6):
        done = random_work(setup, seed, 300, faults=seed % 2 == 0)
        prefetched += counted(done, BLOCKS_PREFETCHED)
    assert prefetched > 5
