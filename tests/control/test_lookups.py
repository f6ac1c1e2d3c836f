"""How long a request waits for what a store has yet to say: by what the answer may save it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvtiers.control.controller import Controller
from kvtiers.control.lookups import MAX_OWED, LookupDesk
from kvtiers.control.outlook import LOOKUP_SHARE
from kvtiers.control.settings import ControlSettings, GroupSettings, StoreSettings
from kvtiers.cost.links import Links, StoreKind
from kvtiers.cost.model import CostModel
from kvtiers.cost.planner import PlanPolicy
from kvtiers.cost.prefill import FALLBACK_SHAPE, PrefillModel
from kvtiers.model.cost_mode import CostMode
from kvtiers.model.keys import BlockKey, Rank, pack_keys
from kvtiers.model.messages import NOT_LOOKED_UP, Lookup, Presence
from kvtiers.observe.metrics import Counters

from .scenes import chain

BLOCK_SIZE, NBYTES = 16, 2 << 20
SHARED = StoreSettings("shared", None)
SETTINGS = ControlSettings(4096, BLOCK_SIZE, NBYTES, stores=(SHARED,))
FLOOR = SETTINGS.lookup_deadline
LONG, SHORT = 2048, 4  # blocks: 3.3 s of computing, and 6 ms


class Engine:
    """A slow engine over a store whose answers a test gives; `now` is its time."""

    def __init__(
        self,
        settings: ControlSettings = SETTINGS,
        mode: CostMode = CostMode.AUTO,
        flops_per_second: float = 1.5e14,
    ) -> None:
        self.now = 100.0
        self.prefill = PrefillModel(0.005, flops_per_second, FALLBACK_SHAPE, 8192)
        kinds = {store.name: StoreKind.MEMORY for store in settings.stores}
        cost = CostModel(self.prefill, Links.seeded(kinds), PlanPolicy(mode))
        self.controller = Controller(settings, [Rank()], cost, Counters())
        self.lookups: list[Lookup] = []

    def hits(self, keys: list[BlockKey], *more: list[BlockKey], request: str = "a") -> int | None:
        """Ask how many blocks of a prompt that is one token longer can be reloaded."""
        num_tokens = len(keys) * BLOCK_SIZE + 1
        answer = self.controller.plan(request, [keys, *more], 0, num_tokens, self.now)
        self.lookups += self.controller.take_lookups()
        return answer.num_blocks

    def waits(self, keys: list[BlockKey], request: str = "a", most: float = 30.0) -> float:
        """Ask every 10 milliseconds until there is an answer; returns for how long."""
        since = self.now
        while self.hits(keys, request=request) is None:
            self.now += 0.01
            assert self.now - since < most, "it waits for ever"
        return self.now - since

    def answer(self, seconds: float = 0.001, present: int = 1) -> None:
        """Answer all that was asked, as an index reader would that took so long."""
        lookups, self.lookups = self.lookups, []
        for lookup in lookups:
            flags = np.full(len(lookup.keys) // 36, present, np.uint8)
            self.controller.answered(Presence(lookup.store, lookup.keys, flags, 0, seconds))

    def saved(self, num_blocks: int) -> float:
        """Seconds of computing that a reload of so many blocks makes needless."""
        num_tokens = num_blocks * BLOCK_SIZE
        return float(self.prefill.seconds(num_tokens + 1) - self.prefill.seconds(1, num_tokens))


@pytest.mark.parametrize("seconds", [0.1, 0.2, 0.3])
def test_a_long_prompt_reloads_what_a_store_names_late(seconds: float) -> None:
    engine, keys = Engine(), chain("a", LONG)
    assert engine.hits(keys) is None
    engine.now += seconds
    assert engine.hits(keys) is None
    engine.answer(seconds)
    assert engine.hits(keys) == LONG


def test_a_long_prompt_waits_for_a_tenth_of_what_it_would_save() -> None:
    engine = Engine()
    waited = engine.waits(chain("a", LONG))
    assert 0.8 * LOOKUP_SHARE * engine.saved(LONG) < waited < LOOKUP_SHARE * engine.saved(LONG)


def test_a_short_prompt_waits_no_longer_than_it_did() -> None:
    engine = Engine()
    assert engine.saved(SHORT) < FLOOR
    assert engine.waits(chain("a", SHORT)) == pytest.approx(FLOOR, abs=0.011)


def test_what_is_known_to_be_there_is_not_waited_for() -> None:
    """Only the last eighth hangs on the answer."""
    engine, keys = Engine(), chain("a", LONG)
    engine.hits(keys[: LONG // 8 * 7], request="head")
    engine.answer()
    assert engine.hits(keys[: LONG // 8 * 7], request="head") == LONG // 8 * 7
    waited = engine.waits(keys)
    assert engine.hits(keys) == LONG // 8 * 7
    everything = Engine().waits(chain("b", LONG))
    assert waited < everything / 4


def test_a_prompt_that_ends_at_a_block_nobody_has_waits_for_what_is_before_it() -> None:
    engine, keys = Engine(), chain("a", LONG)
    assert engine.hits([keys[SHORT]], request="gap") is None
    engine.answer(present=0)
    assert engine.waits(keys) == pytest.approx(FLOOR, abs=0.011)


def test_a_store_that_loads_as_slowly_as_computing_is_not_waited_for() -> None:
    fast = Engine(flops_per_second=1e17)
    assert fast.waits(chain("a", LONG)) == pytest.approx(FLOOR, abs=0.011)


def test_who_never_reloads_waits_for_nothing_longer() -> None:
    never = Engine(mode=CostMode.NEVER)
    assert never.waits(chain("a", LONG)) == pytest.approx(FLOOR, abs=0.011)


def test_nobody_waits_longer_than_for_a_load() -> None:
    """A prompt of minutes, whose tenth is seconds."""
    engine = Engine(replace(SETTINGS, reload_deadline=2.0), flops_per_second=1e12)
    assert engine.saved(LONG) * LOOKUP_SHARE > 10
    assert engine.waits(chain("a", LONG)) == pytest.approx(2.0, abs=0.011)


def test_who_configures_more_waits_more() -> None:
    engine = Engine(replace(SETTINGS, lookup_deadline=5.0))
    assert engine.waits(chain("a", SHORT)) == pytest.approx(5.0, abs=0.011)


# -- a store that hangs -------------------------------------------------------------------


def test_of_a_store_that_hangs_the_first_one_waits_and_no_other() -> None:
    engine = Engine()
    share = LOOKUP_SHARE * engine.saved(LONG)
    assert engine.waits(chain("a", LONG)) < share
    for request in ("b", "c", "d"):
        assert engine.waits(chain(request, LONG), request) == 0
        assert engine.hits(chain(request, LONG), request=request) == 0
    engine.now += 3600
    assert engine.waits(chain("e", LONG), "e") == 0


def test_who_come_together_wait_together() -> None:
    """Sixteen at once: not one share after the other, whatever each has at stake."""
    engine = Engine()
    prompts = {f"r{i}": chain(f"r{i}", LONG - i) for i in range(16)}
    since = engine.now
    for request, keys in prompts.items():
        engine.waits(keys, request)
    assert engine.now - since < LOOKUP_SHARE * engine.saved(LONG)


def test_who_has_more_at_stake_waits_for_the_rest_of_its_share() -> None:
    engine = Engine()
    first = engine.waits(chain("a", LONG // 2))
    second = engine.waits(chain("b", LONG), "b")
    assert 0 < second < LOOKUP_SHARE * engine.saved(LONG) - first + 0.02


def test_a_store_that_answers_again_is_waited_for_again() -> None:
    """At first for a moment, as long as it takes when it does not hang."""
    engine, keys = Engine(), chain("a", LONG)
    engine.waits(keys)
    for request in ("b", "c"):
        assert engine.waits(chain(request, LONG), request) == 0
    engine.now += 60.0
    engine.answer(seconds=60.0)
    assert engine.hits(keys) == LONG
    keys = chain("d", LONG)
    assert engine.hits(keys, request="d") is None
    engine.answer()
    assert engine.hits(keys, request="d") == LONG
    assert engine.waits(chain("e", LONG), "e") > 3 * FLOOR


def test_for_a_store_whose_answers_always_come_too_late_nobody_waits_for_long() -> None:
    """It answers, in 3 s; a share of what is at stake is a third of one."""
    engine = Engine()
    waits = []
    for i in range(8):
        waits.append(engine.waits(chain(f"r{i}", LONG), f"r{i}"))
        engine.now += 3.0
        engine.answer(seconds=3.0)
    assert waits[0] > 3 * FLOOR
    assert waits[2:] == pytest.approx([FLOOR] * 6, abs=0.011)


def test_what_was_not_looked_up_in_time_is_asked_again_by_the_next_who_wants_it() -> None:
    engine, keys = Engine(), chain("a", LONG)
    engine.waits(keys, request="first")
    engine.answer(seconds=11.0, present=NOT_LOOKED_UP)
    assert engine.hits(keys, request="second") is None
    engine.answer()
    assert engine.hits(keys, request="second") == LONG


def test_one_late_answer_among_quick_ones_turns_nobody_away() -> None:
    engine = Engine()
    for request, seconds in (("a", 0.001), ("b", 3.0)):
        engine.hits(chain(request, LONG), request=request)
        engine.answer(seconds)
    assert engine.waits(chain("c", LONG), "c") > 3 * FLOOR


def test_a_store_that_answers_others_is_alive() -> None:
    """A long queue of questions, of which one is answered every 100 ms."""
    engine = Engine()
    for i in range(8):
        engine.hits(chain(f"r{i}", 64), request=f"r{i}")
    keys = chain("last", LONG)
    assert engine.hits(keys, request="last") is None
    queue, engine.lookups = engine.lookups, []
    for lookup in queue[:2]:
        engine.now += 0.1
        engine.lookups = [lookup]
        engine.answer(0.1)
        assert engine.hits(keys, request="last") is None


def test_other_stores_that_answer_are_waited_for_beside_one_that_hangs() -> None:
    settings = replace(SETTINGS, stores=(replace(SHARED, name="hung"), SHARED))
    engine = Engine(settings)
    engine.waits(chain("a", LONG))
    engine.lookups = [lookup for lookup in engine.lookups if lookup.store == "shared"]
    engine.answer()
    keys = chain("b", LONG)
    assert engine.hits(keys, request="b") is None
    engine.lookups = [lookup for lookup in engine.lookups if lookup.store == "shared"]
    engine.answer()
    assert engine.hits(keys, request="b") == LONG


def test_a_reset_forgets_who_owes_an_answer() -> None:
    engine = Engine()
    engine.waits(chain("a", LONG))
    engine.controller.reset()
    assert engine.waits(chain("b", LONG), "b") > 3 * FLOOR


def test_a_store_that_hangs_is_asked_for_a_bounded_number_of_keys() -> None:
    desk = LookupDesk(FLOOR)
    keys = chain("a", 1000)
    column = [key[:-4] + i.to_bytes(4, "big") for i in range(400) for key in keys]
    for start in range(0, len(column), 1000):
        desk.ask({"shared": [BlockKey(k) for k in column[start : start + 1000]]}, 0.0)
    asked = [lookup.keys for lookup in desk.take(epoch=0)]
    assert sum(map(len, asked)) // 36 == MAX_OWED
    for some in asked:
        flags = np.ones(len(some) // 36, np.uint8)
        desk.answered(Presence("shared", some, flags, 0, 0.1))
    desk.ask({"shared": [BlockKey(column[-1])]}, 1.0)
    assert [lookup.keys for lookup in desk.take(epoch=0)] == [column[-1]]


# -- several KV groups --------------------------------------------------------------------


def test_all_groups_of_layers_are_asked_for_in_one_question() -> None:
    groups = tuple(GroupSettings(None, NBYTES // 2) for _ in range(2))
    engine = Engine(replace(SETTINGS, groups=groups, num_layer_ranges=2))
    first, second = chain("a", 64, 0), chain("a", 64, 1)
    assert engine.hits(first, second) is None
    assert [lookup.keys for lookup in engine.lookups] == [pack_keys([*first, *second])]
    engine.answer()
    assert engine.hits(first, second) == 64


def test_a_namesake_of_a_request_that_ended_waits_anew():
    """R20: of one that waited in vain, and was aborted, nothing is left."""
    engine, keys = Engine(), chain("a", SHORT)
    assert engine.hits(keys) is None
    engine.now += 0.8 * FLOOR
    flags = np.full(len(keys), NOT_LOOKED_UP, np.uint8)
    engine.controller.answered(Presence("shared", pack_keys(keys), flags))
    engine.controller.finished("a")
    engine.now += 0.4 * FLOOR
    assert engine.hits(keys) is None
