"""Which blocks are written: by their worth, and within a disk's budget."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import run_state_machine_as_test

from kvtiers.control.admission import WorthItsWrite, make_admission
from kvtiers.control.reuse import ReuseChances
from kvtiers.control.settings import ControlSettings, StoreSettings
from kvtiers.cost.endurance import DAY_SECONDS
from kvtiers.cost.links import LinkModel, Links, offload_link, read_link, reload_link, write_link
from kvtiers.cost.model import CostModel
from kvtiers.cost.planner import PlanPolicy
from kvtiers.cost.prefill import FALLBACK_SHAPE, PrefillModel
from kvtiers.model.errors import ConfigError
from kvtiers.observe.metrics import BLOCKS_DEMOTED, OFFLOADS_DROPPED
from kvtiers.testing import control_machine
from kvtiers.testing.control_machine import ControllerMachine, random_walk

from .scenes import DISK, Scene, chain, dram

BLOCK_SIZE, NBYTES = 16, 2 << 20
BY_COST = ControlSettings(64, BLOCK_SIZE, NBYTES, stores=(StoreSettings("disk", 64, admit="cost"),))


def disk_links(read: float, write: float) -> Links:
    """The links of an H100 and of a disk of some bytes per second."""
    models = {
        offload_link(): LinkModel(5e-5, 4e-6, 50e9),
        reload_link(): LinkModel(5e-5, 4e-6, 50e9),
        read_link("disk"): LinkModel(2e-4, 2e-5, read),
        write_link("disk"): LinkModel(2e-4, 2e-5, write),
    }
    return Links(["disk"], models)


def rule(links: Links, chances: ReuseChances) -> WorthItsWrite:
    """The rule for Llama-3.1-8B."""
    cost = CostModel(PrefillModel(0.005, 5e14, FALLBACK_SHAPE, 8192), links, PlanPolicy())
    admission = make_admission(BY_COST, 0, cost, chances)
    assert isinstance(admission, WorthItsWrite)
    return admission


def test_block_that_is_computed_faster_than_loaded_is_never_written():
    chances = ReuseChances()
    slow = rule(disk_links(1e9, 1e9), chances)
    keys = chain("doc", 10)
    for _ in range(50):
        chances.seen(keys)
    assert not any(slow.worth(key, i) for i, key in enumerate(keys))


def test_more_likely_and_deeper_blocks_are_worth_more():
    chances = ReuseChances()
    chances.seen(chain("once", 2000))
    often = chain("often", 100)
    for _ in range(20):
        chances.seen(often)
    disk = rule(disk_links(12e9, 7e9), chances)
    assert disk.worth(often[0], 0)
    assert not disk.worth(chain("once", 1)[0], 0), "one in twenty came back"
    slower = rule(disk_links(4.5e9, 2e9), chances)
    assert not slower.worth(often[0], 0)
    assert slower.worth(often[0], 10_000), "its tokens attend to 160,000 others"


def test_speeds_are_looked_at_again_after_a_while():
    chances = ReuseChances()
    links = disk_links(12e9, 7e9)
    disk = rule(links, chances)
    key = chain("doc", 1)[0]
    disk.tick(0.0)
    assert disk.worth(key, 0)
    for _ in range(20):
        links[read_link("disk")].observe(8, 8 * NBYTES, 0.1)
    assert disk.worth(key, 0)
    disk.tick(2.0)
    assert not disk.worth(key, 0)


def test_unknown_rule_lists_those_that_exist():
    odd = replace(BY_COST, stores=(StoreSettings("disk", 8, admit="never"),))
    cost = CostModel(
        PrefillModel(0.005, 5e14, FALLBACK_SHAPE, 8192), Links.seeded({}), PlanPolicy()
    )
    with pytest.raises(ConfigError, match="always, cost, second_touch"):
        make_admission(odd, 0, cost, ReuseChances())


class TestBudget:
    """A disk that may be written 240 blocks a day: 10 at once, then one in 6.3 minutes."""

    disk = replace(DISK, write_budget_nbytes=240 * 1000, frame_nbytes=1000)

    def test_what_is_over_the_budget_is_not_written_and_counted_by_reason(self):
        scene = Scene(dram(32, self.disk))
        scene.offload(chain("a", 16))
        assert scene.controller.counters.value(BLOCKS_DEMOTED, ("disk",)) == 10
        assert scene.controller.counters.value(OFFLOADS_DROPPED, ("over_budget_disk",)) == 6
        assert scene.hits(chain("a", 16)) == 16, "DRAM has them all"

    def test_budget_comes_back_with_time(self):
        scene = Scene(dram(64, self.disk))
        scene.offload(chain("a", 16))
        scene.now = DAY_SECONDS / 230 * 4.5
        scene.settle()
        scene.offload(chain("b", 16))
        assert scene.controller.counters.value(BLOCKS_DEMOTED, ("disk",)) == 14

    def test_demotion_drops_what_may_not_be_written(self):
        back = replace(self.disk, write="back")
        scene = Scene(dram(16, back, high_watermark=0.5, low_watermark=0.0))
        scene.offload(chain("a", 16))
        scene.settle()
        assert scene.controller.counters.value(BLOCKS_DEMOTED, ("disk",)) == 10
        assert scene.controller.dram.num_entries < 16


def check_budget(engine) -> None:
    """No rank has written more than the budget allows in the time that has passed."""
    store = engine.settings.stores[0]
    allowed = store.write_budget_nbytes * (1 / 24 + 23 / 24 * engine.now / DAY_SECONDS)
    for rank in engine.ranks:
        assert rank.stores[store.name].num_writes * store.frame_nbytes <= allowed + 1e-6


def test_no_story_makes_a_disk_write_more_than_its_budget():
    class Machine(ControllerMachine):
        SETTINGS = control_machine.budgeted

        def promises_hold(self) -> None:
            if self.engine is not None:
                check_budget(self.engine)

        def teardown(self) -> None:
            self.promises_hold()
            super().teardown()

    run_state_machine_as_test(
        Machine,
        settings=hypothesis_settings(max_examples=40, stateful_step_count=40, deadline=None),
    )


def test_long_walk_keeps_the_budget_and_uses_it():
    engine = random_walk(control_machine.budgeted, 2, 1, 3000)
    check_budget(engine)
    counters = engine.controller.counters
    assert counters.value(OFFLOADS_DROPPED, ("over_budget_disk",)) > 0
    assert counters.value(BLOCKS_DEMOTED, ("disk",)) > 0
