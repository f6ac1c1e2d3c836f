"""Drivers of a simulated engine: a Hypothesis state machine, and a long random walk."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtiers.control.controller import Controller
from kvtiers.control.settings import ControlSettings, GroupSettings, StoreSettings
from kvtiers.cost.links import Links, StoreKind
from kvtiers.cost.model import CostModel
from kvtiers.cost.planner import PlanPolicy
from kvtiers.cost.prefill import ModelShape, PrefillModel
from kvtiers.model.cost_mode import CostMode
from kvtiers.model.keys import Rank
from kvtiers.observe.metrics import Counters
from kvtiers.testing.sim_engine import SimEngine
from kvtiers.testing.sim_request import BLOCK_SIZE, SHARED

dram_only = ControlSettings(num_slots=5, block_size=BLOCK_SIZE, block_nbytes=100)
write_through = ControlSettings(
    4,
    BLOCK_SIZE,
    100,
    stores=(StoreSettings("disk", 7),),
    max_window=2,
    reload_deadline=5.0,
    prefetch_share=0.5,
)
write_back = ControlSettings(
    4,
    BLOCK_SIZE,
    100,
    stores=(StoreSettings("disk", 7, "back", "second_touch"),),
    high_watermark=0.7,
    low_watermark=0.4,
    max_window=1,
    prefetch_share=0.5,
)
budgeted = ControlSettings(
    6,
    BLOCK_SIZE,
    100,
    stores=(StoreSettings("disk", 9, admit="cost", write_budget_nbytes=200_000, frame_nbytes=100),),
    prefetch_share=0.5,
)
shared_store = ControlSettings(
    5, BLOCK_SIZE, 100, stores=(StoreSettings(SHARED, None),), prefetch_share=0.5
)
second_life = ControlSettings(
    5, BLOCK_SIZE, 100, stores=(StoreSettings("disk", 9, inherits=True),), max_window=2
)
two_groups = ControlSettings(
    6,
    BLOCK_SIZE,
    200,
    groups=(GroupSettings(), GroupSettings(window=2 * BLOCK_SIZE)),
    stores=(StoreSettings("disk", 9),),
)


def make_controller(
    settings: ControlSettings, num_ranks: int = 1, mode: CostMode = CostMode.ALWAYS
) -> Controller:
    """Return a controller whose cost model, by default, reloads whatever it finds."""
    links = Links.seeded({store.name: StoreKind.MEMORY for store in settings.stores})
    prefill = PrefillModel(0.005, 1e12, ModelShape(1, 1, 1, 10**9), 8192)
    cost = CostModel(prefill, links, PlanPolicy(mode))
    for _ in range(10):  # measured, so that predictions count
        cost.observe_step(cost.step_flops([64], [0]), 64, float(prefill.seconds(64)))
    return Controller(settings, [Rank(i) for i in range(num_ranks)], cost, Counters())


class ControllerMachine(RuleBasedStateMachine):
    """Lets Hypothesis choose what happens, and shrink what went wrong.

    Subclass it with other `SETTINGS`. There is one rule: of many, Hypothesis leaves some out,
    and without its engine or its ranks a controller does nothing.
    """

    SETTINGS: ClassVar[ControlSettings] = dram_only

    def __init__(self) -> None:
        super().__init__()
        self.engine: SimEngine | None = None

    @initialize(num_ranks=st.integers(1, 3), data=st.data())
    def start(self, num_ranks: int, data: st.DataObject) -> None:
        """Start an engine."""
        controller = make_controller(self.SETTINGS, num_ranks)
        self.engine = SimEngine(controller, num_ranks, lambda options: options[0])
        self.happens(data)

    @rule(data=st.data())
    def happens(self, data: st.DataObject) -> None:
        """One thing happens."""
        if self.engine is not None:
            self.engine.choose = lambda options: data.draw(st.sampled_from(options))
            self.engine.happens()

    @invariant()
    def promises_are_kept(self) -> None:
        """See `SimEngine.check`."""
        if self.engine is not None:
            self.engine.check()

    def teardown(self) -> None:
        """Everything returns to its start."""
        if self.engine is not None:
            self.engine.end()


def random_walk(
    settings: ControlSettings,
    num_ranks: int,
    seed: int,
    num_events: int,
    mode: CostMode = CostMode.ALWAYS,
) -> SimEngine:
    """Let many random things happen to an engine, checking all the way and at the end."""
    rng = random.Random(seed)

    def choose(options: Any) -> Any:
        return rng.choice(options)

    engine = SimEngine(make_controller(settings, num_ranks, mode), num_ranks, choose)
    for _ in range(num_events):
        engine.happens()
        engine.check()
    engine.end()
    return engine
