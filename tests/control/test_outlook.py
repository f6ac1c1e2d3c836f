"""What plans know of the moment, how long loads may take, and what a link that hangs costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtiers.control.controller import Controller
from kvtiers.control.outlook import EngineLoad
from kvtiers.control.reload import LoadRequest
from kvtiers.control.settings import ControlSettings, GroupSettings, StoreSettings
from kvtiers.control.tier import Residence
from kvtiers.cost.links import LinkModel, Links, offload_link, read_link, reload_link, write_link
from kvtiers.cost.model import TRIAL_BLOCKS, CostModel
from kvtiers.cost.planner import PlanPolicy, PlanReason
from kvtiers.cost.preempt import PreemptMode, PreemptReason, Surroundings
from kvtiers.cost.prefill import FALLBACK_SHAPE, PrefillModel
from kvtiers.cost.trust import FIRST_WAIT_SECONDS, Standing
from kvtiers.model.cost_mode import CostMode
from kvtiers.model.keys import BlockKey, Rank
from kvtiers.model.messages import Link, Transfer
from kvtiers.model.outcome import Outcome
from kvtiers.observe.metrics import BLOCKS_FAILED, BLOCKS_RELOADED, Counters
from kvtiers.testing import control_machine
from kvtiers.testing.control_machine import random_walk
from kvtiers.testing.sim_rank import SimRank, SimStore

from .scenes import chain

BLOCK_SIZE, NBYTES, NUM_BLOCKS = 16, 2 << 20, 512
DISK = read_link("disk")
SETTINGS = ControlSettings(
    1024, BLOCK_SIZE, NBYTES, stores=(StoreSettings("disk", 4096),), max_window=64
)


class Engine:
    """Llama-3.1-8B on an H100 with a Gen5 disk, and one rank whose answers a test words."""

    def __init__(
        self,
        settings: ControlSettings = SETTINGS,
        policy: PlanPolicy | None = None,
        *,
        num_steps: int = 10,
    ) -> None:
        self.busy_seconds, self.computes = 0.0, False
        self.now = 100.0
        prefill = PrefillModel(0.005, 5e14, FALLBACK_SHAPE, 8192)
        models = {
            offload_link(): LinkModel(5e-5, 4e-6, 50e9),
            reload_link(): LinkModel(5e-5, 4e-6, 50e9),
            DISK: LinkModel(2e-4, 2e-5, 12e9),
            write_link("disk"): LinkModel(2e-4, 2e-5, 7e9),
        }
        self.cost = CostModel(prefill, Links(["disk"], models), policy or PlanPolicy())
        for _ in range(num_steps):
            flops = self.cost.step_flops([1024], [0])
            self.cost.observe_step(flops, 1024, float(prefill.seconds(1024)))
        self.controller = Controller(
            settings,
            [Rank()],
            self.cost,
            Counters(),
            lambda: EngineLoad(self.busy_seconds, self.computes),
        )
        store = SimStore(4096)
        self.rank = SimRank(Rank(), settings.num_slots, {"disk": store})
        self._next_block = 0

    def store(self, keys: list[BlockKey], *, only_below: bool = False) -> None:
        """Offload a document; leave it on the disk alone where asked."""
        block_ids = self._blocks(len(keys))
        self.rank.compute(block_ids, keys)
        self.controller.computed(keys, block_ids, 0, len(keys))
        self.settle()
        if only_below:
            for entry in list(self.controller.dram.entries()):
                self.controller.dram.doom(entry)

    def plan(self, request: str, keys: list[BlockKey]):
        num_tokens = len(keys) * BLOCK_SIZE + 1
        return self.controller.plan(request, [keys], 0, num_tokens, self.now).plan

    def load(self, request: str, keys: list[BlockKey], num_blocks: int) -> Transfer:
        """Let the engine take what was planned; returns the order."""
        block_ids = self._blocks(num_blocks)
        job_id = self.controller.allocated(
            LoadRequest(request, [keys], [block_ids], 0, num_blocks), self.now
        )
        orders = self.controller.take_orders(0, (), self.now)
        self.rank.take(orders)
        return next(order for order in orders.before if order.job_id == job_id)

    def hang(self, order: Transfer, first: int = 0) -> None:
        """The blocks of a load from some on do not come in time."""
        self.now += order.deadline
        faults = dict.fromkeys(range(first, order.num_blocks), Outcome.TIMED_OUT)
        self.controller.completed(self.rank.answer(order.job_id, faults), self.now)

    def come(self, order: Transfer, seconds: float) -> None:
        """All blocks come, and the disk is measured."""
        self.now += seconds
        self.controller.completed(self.rank.answer(order.job_id), self.now)
        nbytes = order.num_blocks * NBYTES
        self.cost.observe_links([Link(DISK, order.num_blocks, nbytes, seconds)])

    def settle(self) -> None:
        for _ in range(8):
            self.rank.take(self.controller.take_orders(0, (), self.now))
            for job_id in self.rank.answerable():
                self.controller.completed(self.rank.answer(job_id), self.now)

    def _blocks(self, num: int) -> list[int]:
        first, self._next_block = self._next_block, self._next_block + num
        return list(range(first, first + num))


def test_load_is_free_while_the_device_is_busy_for_longer():
    engine = Engine(policy=PlanPolicy(margin=0.0))
    keys = chain("doc", NUM_BLOCKS)
    engine.store(keys)
    idle = engine.plan("idle", keys)
    engine.busy_seconds = 3.0
    busy = engine.plan("busy", keys)
    assert idle.chosen_seconds < 0.2
    assert busy.recompute_seconds == pytest.approx(idle.recompute_seconds + 3.0)
    assert busy.chosen_seconds == pytest.approx(3.0, rel=0.01)


def test_who_loads_counts_in_the_plans_of_others_until_it_is_there():
    engine = Engine()
    keys, other = chain("doc", NUM_BLOCKS), chain("other", NUM_BLOCKS)
    engine.store(keys)
    plan = engine.plan("a", keys)
    order = engine.load("a", keys, plan.num_blocks)
    outlook = engine.controller.outlook
    (ready,) = outlook.prompt(1000, 0, engine.now).others_ready_seconds
    assert ready == pytest.approx(plan.load_seconds)
    (ready,) = outlook.prompt(1000, 0, engine.now + 60).others_ready_seconds
    assert ready == 0.0
    engine.come(order, 0.1)
    assert outlook.prompt(len(other), 0, engine.now).others_ready_seconds == ()


def test_window_counts_only_the_blocks_that_are_loaded():
    groups = (GroupSettings(None, NBYTES // 4), GroupSettings(64, 3 * NBYTES // 4))
    whole = Engine(replace(SETTINGS, stores=()))
    windowed = Engine(replace(SETTINGS, stores=(), groups=groups))
    outlook = windowed.controller.outlook
    (window,) = outlook.prompt(1000, 0, 0.0).windows
    assert (window.block_nbytes, window.num_blocks) == (3 * NBYTES // 4, 4)
    assert whole.controller.outlook.prompt(1000, 0, 0.0).windows == ()


class TestDeadline:
    def deadline(self, engine: Engine, num_blocks: int = NUM_BLOCKS) -> float:
        keys = chain("doc", num_blocks)
        engine.store(keys, only_below=True)
        plan = engine.plan("a", keys)
        assert plan.num_blocks == num_blocks
        return engine.load("a", keys, num_blocks).deadline

    def test_load_may_take_as_long_as_computing_its_blocks_and_little_more(self):
        engine = Engine()
        computed = float(engine.cost.prefill.seconds(NUM_BLOCKS * BLOCK_SIZE))
        assert computed < self.deadline(engine) < 1.2 * computed + 0.25

    def test_configured_deadline_bounds_it(self):
        engine = Engine(replace(SETTINGS, reload_deadline=0.2))
        assert self.deadline(engine) == pytest.approx(0.2)

    def test_speeds_that_were_never_measured_are_not_trusted_with_it(self):
        engine = Engine(num_steps=2)
        assert self.deadline(engine) == pytest.approx(SETTINGS.reload_deadline)

    def test_user_who_wants_every_reload_waits_for_it(self):
        engine = Engine(policy=PlanPolicy(CostMode.ALWAYS))
        assert self.deadline(engine) == pytest.approx(SETTINGS.reload_deadline)


class TestStall:
    """A disk that hangs in mid-load."""

    def stalled(self, arrived: int = 0) -> tuple[Engine, float]:
        """Return an engine whose disk hung after some blocks, and what that took."""
        engine = Engine()
        for name in ("a", "b", "c", "d"):
            engine.store(chain(name, 128), only_below=True)
        keys = chain("a", 128)
        order = engine.load("a", keys, engine.plan("a", keys).num_blocks)
        before = engine.now
        engine.hang(order, arrived)
        return engine, engine.now - before

    def test_it_costs_one_deadline_once_and_the_link_is_avoided(self):
        engine, seconds = self.stalled()
        computed = float(engine.cost.prefill.seconds(128 * BLOCK_SIZE))
        assert seconds < 1.2 * computed + 0.25
        assert engine.cost.links.standing(DISK) is Standing.LOST
        assert engine.plan("b", chain("b", 128)).num_blocks == 0

    def test_what_arrived_is_kept(self):
        engine, _ = self.stalled(arrived=50)
        keys = chain("a", 128)
        entries = [engine.controller.dram.get(key) for key in keys]
        assert all(entry.residence is Residence.READY for entry in entries[:50])
        assert entries[50] is None

    def test_link_is_tried_with_few_blocks_by_one_request_and_used_again(self):
        engine, _ = self.stalled()
        engine.now += FIRST_WAIT_SECONDS + 0.1
        engine.settle()
        keys = chain("b", 128)
        trial = engine.plan("b", keys)
        assert (trial.reason, trial.num_blocks) == (PlanReason.TRIAL, TRIAL_BLOCKS)
        order = engine.load("b", keys, trial.num_blocks)
        assert engine.plan("c", chain("c", 128)).num_blocks == 0, "one tries, not all"
        engine.come(order, TRIAL_BLOCKS * NBYTES / 12e9)
        assert engine.plan("d", chain("d", 128)).num_blocks == 128

    def test_plan_that_was_made_before_the_stall_is_made_anew(self):
        engine = Engine()
        for name in ("a", "b"):
            engine.store(chain(name, 128), only_below=True)
        first = engine.plan("b", chain("b", 128))
        order = engine.load("a", chain("a", 128), engine.plan("a", chain("a", 128)).num_blocks)
        engine.hang(order)
        again = engine.plan("b", chain("b", 128))
        assert (first.num_blocks, again.num_blocks) == (128, 0)

    def test_trial_may_take_no_longer_than_its_few_blocks_are_worth(self):
        engine, _ = self.stalled()
        engine.now += FIRST_WAIT_SECONDS + 0.1
        engine.settle()
        keys = chain("b", 128)
        order = engine.load("b", keys, engine.plan("b", keys).num_blocks)
        assert order.deadline < 0.3


class TestNoticing:
    """How long a load is done before it is noticed is learnt from the links' own meters."""

    def reload(self, engine: Engine, name: str, worked: float, lived: float) -> None:
        """Load a document from the disk; the link worked for a part of the load's life."""
        keys = chain(name, NUM_BLOCKS)
        engine.store(keys, only_below=True)
        order = engine.load(name, keys, engine.plan(name, keys).num_blocks)
        engine.cost.links.moved([Link(DISK, NUM_BLOCKS, NUM_BLOCKS * NBYTES, worked)])
        engine.come(order, lived)
        engine.controller.finished(name)

    def predicted(self, engine: Engine) -> float:
        return engine.controller.outlook.prompt(1000, 0, engine.now).notice_seconds

    def test_it_is_what_a_load_lived_longer_than_its_link_worked(self):
        engine = Engine()
        for i in range(5):
            self.reload(engine, f"doc{i}", worked=0.09, lived=0.098)
        assert self.predicted(engine) == pytest.approx(0.008)
        plan = engine.plan("next", chain("doc0", NUM_BLOCKS))
        assert plan.num_blocks == NUM_BLOCKS
        idle = engine.cost.predict_load_seconds([0, NUM_BLOCKS], NBYTES)
        assert plan.load_seconds == pytest.approx(idle + 0.008, rel=0.01)

    def test_a_slower_link_is_not_taken_for_it(self):
        engine = Engine()
        for i in range(5):
            self.reload(engine, f"doc{i}", worked=0.9, lived=0.905)
        assert self.predicted(engine) == pytest.approx(0.005)

    def test_an_engine_that_computes_notices_at_the_ends_of_its_steps(self):
        engine = Engine()
        engine.computes = True
        step = float(engine.cost.prefill.seconds(1024))
        for i in range(5):
            self.reload(engine, f"doc{i}", worked=0.09, lived=0.09 + 0.6 * step)
        assert self.predicted(engine) == pytest.approx(0.6 * step, rel=0.02)
        engine.computes = False
        assert self.predicted(engine) < 0.002

    def test_what_the_device_had_to_do_in_any_case_is_not_waited_for(self):
        engine = Engine()
        engine.busy_seconds = 0.2
        for i in range(5):
            self.reload(engine, f"doc{i}", worked=0.09, lived=0.201)
        assert self.predicted(engine) == pytest.approx(0.001)

    def test_meters_of_several_jobs_at_once_say_nothing(self):
        engine = Engine()
        before = self.predicted(engine)
        for i in range(5):
            self.reload(engine, f"doc{i}", worked=0.2, lived=0.15)
        assert self.predicted(engine) == before

    def test_loads_within_a_step_teach_nothing(self):
        engine = Engine(replace(SETTINGS, in_step_seconds=1.0))
        before = self.predicted(engine)
        for i in range(5):
            keys = chain(f"doc{i}", 16)
            engine.store(keys)
            plan = engine.plan("a", keys)
            assert plan.load_seconds == pytest.approx(
                engine.cost.predict_load_seconds([16], NBYTES)
            )
            block_ids = engine._blocks(16)
            job_id = engine.controller.allocated(
                LoadRequest("a", [keys], [block_ids], 0, 16), engine.now
            )
            engine.rank.take(engine.controller.take_orders(100, [job_id], engine.now))
            engine.now += 0.04
            engine.controller.completed(engine.rank.answer(job_id), engine.now)
            engine.controller.finished("a")
        assert self.predicted(engine) == before


@pytest.mark.parametrize("name", ["write_through", "shared_store", "two_groups"])
def test_long_walk_of_an_engine_that_decides_for_itself(name):
    """Links stall, are avoided and tried again, and nothing is leaked."""
    engine = random_walk(getattr(control_machine, name), 2, 1, 8000, CostMode.AUTO)
    counters = engine.controller.counters
    assert counters.value(BLOCKS_RELOADED, ("dram",)) > 20
    assert counters.value(BLOCKS_FAILED, ("timed_out",)) > 10


class TestPreemption:
    def test_long_victim_is_swapped_and_a_short_one_computed(self):
        engine = Engine()
        keys = chain("doc", 4096)
        long = engine.controller.preemption([keys], 4096 * BLOCK_SIZE)
        short = engine.controller.preemption([keys], BLOCK_SIZE - 1)
        assert (long.swap, long.reason) == (True, PreemptReason.SWAP_FASTER)
        assert not short.swap

    def test_what_is_stored_need_not_be_copied_down(self):
        engine = Engine(num_steps=0)  # no step is known that would cover the copy
        keys = chain("doc", NUM_BLOCKS)
        num_tokens, around = NUM_BLOCKS * BLOCK_SIZE, Surroundings(num_waiting=1000)
        before = engine.controller.preemption([keys], num_tokens, around=around)
        engine.store(keys)
        after = engine.controller.preemption([keys], num_tokens, around=around)
        assert after.swap_cost_seconds < 0.6 * before.swap_cost_seconds

    def test_user_and_groups_have_the_last_word(self):
        engine = Engine()
        keys = chain("doc", 4)
        forced = engine.controller.preemption([keys], 64, mode=PreemptMode.SWAP)
        several = engine.controller.preemption([keys], 64, 2, PreemptMode.RECOMPUTE)
        assert (forced.swap, several.swap) == (True, True)
        assert several.reason is PreemptReason.SEVERAL_SEQUENCES

    def test_asking_changes_nothing(self):
        engine = Engine()
        keys = chain("doc", 8)
        engine.store(keys)
        version = engine.controller.dram.version
        engine.controller.preemption([keys], 128)
        assert engine.controller.dram.version == version
        assert not engine.controller.busy
