"""What goes wrong below the engine costs it time, never a token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvtiers.connector import stores as stores_module
from kvtiers.control.breaker import NUM_FAILURES
from kvtiers.data.memory_store import MemoryStore
from kvtiers.data.slab import Slab
from kvtiers.data.store import FrameRef, StoreTicket
from kvtiers.model.outcome import Outcome
from kvtiers.observe.metrics import BLOCKS_FAILED, HIT_TOKENS
from kvtiers.testing.faults import FaultyStore, Flip, HeldStore, LateStore, WrapperStore

from .answers import Answer, differences, random_prompt
from .harness import Engine, EngineOptions, Engines
from .scenarios import SCENARIOS, SMALL_POOL, References, Scenario
from .tiers import SLOT_NBYTES, Tiers, dram, memory, tiered

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOMY = EngineOptions(num_gpu_blocks=512)
BLOCK = ROOMY.block_size
PROMPT = random_prompt(30 * BLOCK + 1, seed=90)
# DRAM for one prompt, so that another pushes it down; a deadline that bites.
BELOW = {
    **dram(f"{40 * SLOT_NBYTES // 1024}KiB", memory()),
    "reload": {"deadline": "300ms", "sync_below": "0ms"},
}

Wrap = Callable[[MemoryStore, Slab], WrapperStore]


class Below:
    """The store below DRAM of the engine that is running."""

    store: Any = None


@pytest.fixture
def start(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Start an engine whose lower store is wrapped; it is not left to other tests."""

    def start(wrap: Wrap, options: EngineOptions = ROOMY) -> Engine:
        def make(slab: Slab, capacity_nbytes: int) -> WrapperStore:
            Below.store = wrap(MemoryStore(slab, capacity_nbytes), slab)
            return Below.store

        monkeypatch.setattr(stores_module, "MemoryStore", make)
        return engines.restart(tiered(options, BELOW))

    yield start
    engines.shutdown()


def push_down(engine: Engine, seed: int) -> None:
    """Let another prompt take DRAM, and the engine forget its own prefix cache."""
    engine.generate([random_prompt(36 * BLOCK + 1, seed=seed)], 2)
    engine.settle()
    assert engine.reset_prefix_cache()


def store_prompt(engine: Engine) -> Answer:
    """Compute the prompt, and push it down: most of its blocks are now only below DRAM."""
    [first] = engine.generate([PROMPT], 12)
    engine.settle()
    push_down(engine, seed=91)
    return first


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        (Outcome.MISSING, "missing"),
        (Outcome.FAILED, "failed"),
        (OSError("input/output error"), "failed"),
        (RuntimeError("a bug in a store"), "failed"),
        (Flip(offset=5000), "corrupt"),
        (Flip(offset=30), "corrupt"),
    ],
    ids=["missing", "failed", "OSError", "RuntimeError", "payload flipped", "header flipped"],
)
def test_a_failed_reload_is_computed_and_forgotten(
    start: Callable[..., Engine], fault: Any, outcome: str
) -> None:
    engine = start(FaultyStore)
    first = store_prompt(engine)
    tiers = Tiers(engine)
    Below.store.fail("get", fault)
    [again] = engine.generate([PROMPT], 12)
    assert tiers.count(BLOCKS_FAILED, outcome) > 0
    assert not differences({"it": first}, {"it": again})
    shorter = PROMPT[: 9 * BLOCK + 3]
    [from_own_cache] = engine.generate([shorter], 12)
    engine.clear()
    [computed] = engine.generate([shorter], 12)
    assert not differences({"it": computed}, {"it": from_own_cache})
    tiers.assert_at_rest()


def test_a_store_that_hangs_costs_one_deadline(start: Callable[..., Engine]) -> None:
    engine = start(lambda store, _: HeldStore(store))
    [first] = engine.generate([PROMPT], 12)
    release_all(engine)
    engine.generate([random_prompt(36 * BLOCK + 1, seed=91)], 2)
    release_all(engine)
    assert engine.reset_prefix_cache()
    tiers = Tiers(engine)
    [held] = engine.generate([PROMPT], 12)
    assert tiers.count(BLOCKS_FAILED, "timed_out") > 0
    assert not differences({"it": first}, {"it": held})
    release_all(engine)
    tiers.assert_at_rest()


def release_all(engine: Engine) -> None:
    """Let all that the store holds happen, and all that follows from it."""
    connector = engine.inside.scheduler_connector.scheduler_side.connector
    deadline = time.monotonic() + 30
    while connector.busy or Below.store.num_held:
        Below.store.release()
        engine.step()
        assert time.monotonic() < deadline


class Outage(HeldStore):
    """Works at once, but while it hangs reads wait for the end of it, and while it fails they fail.

    Attributes:
        how: None, "fails" or "hangs".
    """

    how: str | None = None

    def put(self, frames: Sequence[FrameRef]) -> StoreTicket:
        """Write now."""
        ticket = super().put(frames)
        self.release(1, newest_first=True)
        return ticket

    def get(self, frames: Sequence[FrameRef]) -> StoreTicket:
        """Read now, or as the outage wants it."""
        if self.how == "fails":
            raise OSError("input/output error")
        ticket = super().get(frames)
        if self.how is None:
            self.release(1, newest_first=True)
        return ticket


@pytest.mark.parametrize(("how", "num_failures"), [("fails", NUM_FAILURES), ("hangs", 2)])
def test_a_store_that_keeps_failing_is_left_alone_until_it_works_again(
    start: Callable[..., Engine], how: str, num_failures: int
) -> None:
    engine = start(lambda store, _: Outage(store))
    first = store_prompt(engine)
    tiers, gates = Tiers(engine), Tiers(engine).controller.gates

    def again(seed: int) -> tuple[int, int]:
        """Ask again; returns the tokens found in the store, and those that came from it."""
        if Below.store.how == "hangs":  # it lets go of nothing: there is no rest to wait for
            engine.generate([random_prompt(36 * BLOCK + 1, seed=seed)], 2)
            assert engine.reset_prefix_cache()
        else:
            push_down(engine, seed)
        before = tiers.count(HIT_TOKENS, "memory"), tiers.reloaded_tokens("memory")
        [answer] = engine.generate([PROMPT], 12)
        assert not differences({"it": first}, {"it": answer})
        after = tiers.count(HIT_TOKENS, "memory"), tiers.reloaded_tokens("memory")
        return after[0] - before[0], after[1] - before[1]

    Below.store.how = how
    for turn in range(num_failures):
        assert gates.readable(0), f"given up after {turn} failures"
        found, came = again(100 + turn)
        assert (found > 0, came) == (True, 0)
    for turn in range(3):
        assert not gates.readable(0)
        assert again(200 + turn) == (0, 0)  # nobody counts on it, so nobody waits
    Below.store.how = None
    Below.store.release()
    deadline = time.monotonic() + 30
    while not gates.readable(0):
        engine.generate([random_prompt(2 * BLOCK, seed=300)], 2)
        assert time.monotonic() < deadline, "never tried again"
    found, came = again(400)
    assert found == came > 0
    tiers.assert_at_rest()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_answers_that_come_late_and_out_of_order_change_nothing(
    start: Callable[..., Engine], references: References, scenario: Scenario
) -> None:
    expected = references.answers(scenario, SMALL_POOL)
    engine = start(lambda store, _: LateStore(store, polls=5, seed=1), SMALL_POOL)
    tiers = Tiers(engine)
    assert not differences(expected, scenario.drive(engine))
    tiers.assert_at_rest()


@pytest.mark.parametrize("when", ["before its first step", "in its load", "after a token"])
def test_an_aborted_request_gives_everything_back(start: Callable[..., Engine], when: str) -> None:
    engine = start(lambda store, _: LateStore(store, polls=50))
    first = store_prompt(engine)
    tiers = Tiers(engine)
    pool = engine.inside.scheduler.kv_cache_manager.block_pool
    for turn in range(5):
        push_down(engine, seed=92 + turn)
        free = pool.get_num_free_blocks()
        name = engine.add(PROMPT, 12)
        if when == "in its load":
            engine.run_until(lambda: name in engine.loading)  # noqa: B023 - used at once
        elif when == "after a token":
            engine.run_until(lambda: bool(engine.answers[name].token_ids))  # noqa: B023
        engine.abort(name)
        engine.settle()
        tiers.assert_at_rest()
        assert pool.get_num_free_blocks() == free, f"turn {turn}: blocks leaked"
    [again] = engine.generate([PROMPT], 12)
    assert not differences({"it": first}, {"it": again})
