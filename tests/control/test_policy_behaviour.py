"""What each replacement rule is known for, over whole tiers that are asked for blocks."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence

import pytest

from kvtiers.control.policy import POLICIES, make_policy
from kvtiers.control.policy.adaptive import RULES, Adaptive
from kvtiers.control.policy.base import EvictionPolicy
from kvtiers.control.policy.cost import Cost
from kvtiers.control.policy.ghosts import Ghosts
from kvtiers.control.policy.lines import fingerprint
from kvtiers.control.policy.shadow import Contest, Shadow, stand_in
from kvtiers.control.policy.sketch import Sketch
from kvtiers.control.tier import Tier
from kvtiers.model.keys import BlockKey, block_key
from kvtiers.testing.policy_suite import Conductor, keys

CAPACITY = 100


def chain(name: int, length: int) -> list[BlockKey]:
    """The keys of one prompt."""
    return [
        block_key(bytes([depth]).ljust(8, b"\0") + name.to_bytes(8, "big"), 0)
        for depth in range(length)
    ]


def num_hits(policy: EvictionPolicy, prompts: Iterable[Sequence[BlockKey]]) -> int:
    """Blocks found by prompts that come one after another, and leave what they computed."""
    return sum(ask(tier, prompt) for tier in [Tier("dram", CAPACITY, policy)] for prompt in prompts)


def ask(tier: Tier, prompt: Sequence[BlockKey]) -> int:
    entries = []
    for key in prompt:
        entry = tier.get(key)
        if entry is None:
            break
        entries.append(entry)
    tier.touch(reversed(entries))
    parent = prompt[len(entries) - 1] if entries else None
    for key in prompt[len(entries) :]:
        new = None if tier.get(key) else tier.reserve(key, parent)
        if new is None:
            break
        tier.commit(new)
        parent = key
    return len(entries)


def scan_over_a_working_set(seed: int = 0) -> list[list[BlockKey]]:
    """Half of all prompts are of 12 that come again and again, the others come once."""
    rng = random.Random(seed)
    once = iter(range(1000, 10_000))
    return [chain(rng.randrange(12) if rng.random() < 0.5 else next(once), 5) for _ in range(1500)]


def loop(times: int = 60) -> list[list[BlockKey]]:
    """Thirty prompts of five blocks in turn: half as many again as the tier holds."""
    return [chain(name, 5) for _ in range(times) for name in range(30)]


@pytest.mark.parametrize("name", ["arc", "s3-fifo", "w-tinylfu", "cost", "adaptive"])
def test_one_time_prompts_do_not_flush_what_is_asked_for_again(name):
    prompts = scan_over_a_working_set()
    assert num_hits(make_policy(name, CAPACITY), prompts) > 1.1 * num_hits(
        make_policy("lru", CAPACITY), prompts
    )


@pytest.mark.parametrize("name", ["w-tinylfu", "cost", "adaptive"])
def test_loop_larger_than_the_tier_still_hits(name):
    prompts = loop()
    assert num_hits(make_policy("lru", CAPACITY), prompts) == 0
    found = num_hits(make_policy(name, CAPACITY), prompts)
    assert found > 0.3 * 5 * len(prompts)  # two thirds of a loop fit


@pytest.mark.parametrize("name", POLICIES)
def test_same_calls_give_the_same_victims(name):
    def victims() -> list[BlockKey]:
        tier = Tier("dram", CAPACITY, make_policy(name, CAPACITY))
        left: list[BlockKey] = []
        for prompt in scan_over_a_working_set():
            ask(tier, prompt)
            left += tier.take_left()
        return left

    assert victims() == victims()


@pytest.mark.parametrize("name", POLICIES)
def test_memory_does_not_grow_with_what_has_passed(name):
    """A tier that saw four times as many keys holds no more than before."""
    policy = make_policy(name, CAPACITY)
    tier = Tier("dram", CAPACITY, policy)
    sizes = []
    for first, end in ((0, 3000), (3000, 12_000)):
        for number in range(first, end):
            ask(tier, chain(number, 1))
            tier.take_left()
        sizes.append(size_of(policy))
    assert sizes[1] < 1.1 * sizes[0]


def size_of(root: object) -> int:
    """Bytes of an object and all that it alone leads to."""
    seen: set[int] = set()
    todo = [root]
    total = 0
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, type) or callable(item):
            continue
        seen.add(id(item))
        total += sys.getsizeof(item)
        if isinstance(item, dict):
            todo += [*item.keys(), *item.values()]
        elif not isinstance(item, str | bytes | bytearray | int | float):
            todo += list(item) if isinstance(item, list | tuple | set) else []
            if hasattr(item, "popleft"):
                todo += list(item)
            todo += [vars(item)] if hasattr(item, "__dict__") else []
            slots = [s for kind in type(item).__mro__ for s in getattr(kind, "__slots__", ())]
            todo += [getattr(item, slot) for slot in slots if hasattr(item, slot)]
    return total


# -- cost --------------------------------------------------------------------------------


def test_of_blocks_used_alike_the_one_that_saves_least_leaves():
    early, late = keys(1, 2)
    for cheap in (early, late):
        conductor = Conductor(learned(lambda key, cheap=cheap: 1.0 if key == cheap else 3.0))
        for operation in ("admitted", "exposed"):
            conductor.apply(operation, early)
            conductor.apply(operation, late)
        assert conductor.policy.next_victim() == cheap


def test_block_that_is_cheaper_to_compute_than_to_load_leaves_first():
    worthless, fine = keys(1, 2)
    conductor = Conductor(learned(lambda key: 0.0 if key == worthless else 1e-3))
    for key in (fine, worthless):
        conductor.apply("admitted", key)
        conductor.apply("exposed", key)
    conductor.apply("touched", worthless)  # however recent
    assert conductor.policy.next_victim() == worthless


def test_chance_of_reuse_outweighs_what_a_block_saves():
    """What is asked for often stays, though one asked for once would save twice as much."""
    often, once = keys(1, 2)
    conductor = Conductor(learned(lambda key: 1.0 if key == often else 2.0))
    for key in (often, once):
        conductor.apply("admitted", key)
        conductor.apply("exposed", key)
    for _ in range(4):
        conductor.apply("touched", often)
    assert conductor.policy.next_victim() == once


def learned(value) -> Cost:
    """A rule that has seen hot keys come back and cold ones stay away."""
    policy = Cost(CAPACITY, value)
    tier = Tier("dram", CAPACITY, policy)
    for prompt in scan_over_a_working_set():
        ask(tier, prompt)
    tier.reset()
    return policy


# -- adaptive ----------------------------------------------------------------------------


def test_adaptive_is_near_the_best_when_the_workload_changes():
    rng = random.Random(7)
    popular = [[1 / (rank + 1) for rank in range(80)] for _ in range(2)]
    prompts = scan_over_a_working_set() + loop(50)
    prompts += [chain(5000 + rng.choices(range(80), popular[0])[0], 5) for _ in range(1500)]
    hits = {name: num_hits(make_policy(name, CAPACITY), prompts) for name in POLICIES}
    best = max(hits[name] for name in RULES)
    assert hits["adaptive"] >= 0.95 * best, hits


def test_leader_changes_when_another_rule_does_clearly_better():
    contest = Contest(CAPACITY, {name: RULES[name] for name in ("lru", "w-tinylfu")}, "lru")
    for prompt in loop():
        compete(contest, prompt)
    assert contest.leader == "w-tinylfu"


def test_leader_stays_while_rules_do_alike():
    contest = Contest(CAPACITY, {name: RULES[name] for name in ("lru", "arc")}, "lru")
    for number in range(20_000):
        compete(contest, chain(number, 1))
    assert contest.leader == "lru"


def compete(contest: Contest, prompt: Sequence[BlockKey]) -> None:
    before = None
    for key in prompt:
        contest.asked(stand_in(fingerprint(key)), before, tied=True)
        before = stand_in(fingerprint(key))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("workload", ["scan", "chats"])
def test_whole_shadow_has_the_hits_of_its_tier(name, workload):
    """It learns from what `adaptive` is told which block follows which, and that only tails leave;
    the tier of another rule hits other blocks."""
    prompts = scan_over_a_working_set() if workload == "scan" else chats()
    expected = num_hits(make_policy(name, CAPACITY), prompts)
    policy = Adaptive(CAPACITY)
    policy._stop_guessing()  # as the first parent that a tier tells has it do
    shadow = policy._contest._shadows[name]
    policy._contest._until_judged = 10**9
    num_hits(policy, prompts)
    assert shadow.num_hits == pytest.approx(expected, rel=0.02)


def chats(seed: int = 1) -> list[list[BlockKey]]:
    """Sixteen chats at once, of which each goes on for some turns; their prompts begin alike."""
    rng = random.Random(seed)
    names, lengths = list(range(16)), [4] * 16
    prompts = []
    for _ in range(3000):
        idx = rng.randrange(16)
        lengths[idx] += rng.randrange(1, 4)
        if lengths[idx] > 24:
            names[idx], lengths[idx] = max(names) + 1, 4
        prompts.append(chain(1_000_000, 2) + chain(names[idx], lengths[idx]))
    return prompts


def test_shadow_counts_no_key_behind_one_that_it_lacks():
    shadow = Shadow(4, make_policy("lru", 4))
    first, second, third = chain(1, 3)
    shadow.ask([second, third], first, tied=False, goes_on=False)
    shadow.ask([first, second], None, tied=False, goes_on=False)
    shadow.ask([third], second, tied=False, goes_on=True)  # of the same prompt
    assert shadow.num_hits == 0
    shadow.ask([first, second], None, tied=False, goes_on=False)
    shadow.ask([third], second, tied=False, goes_on=True)
    assert shadow.num_hits == 3


def test_shadow_keeps_what_another_key_follows():
    """The oldest of a chain, but not its tail, may not leave for one that follows the tail."""
    shadow = Shadow(3, make_policy("lru", 3))
    shadow.ask(chain(1, 3), None, tied=True, goes_on=False)
    shadow.ask(chain(2, 1), None, tied=True, goes_on=False)
    shadow.ask(chain(1, 3), None, tied=True, goes_on=False)
    assert shadow.num_hits == 2
    shadow.ask(chain(3, 5), None, tied=True, goes_on=False)
    shadow.ask(chain(3, 5), None, tied=True, goes_on=False)
    assert shadow.num_hits == 2 + 3  # the last two had no room, as in a tier


def test_change_of_leader_keeps_every_block(monkeypatch):
    """Whoever leads meanwhile, all blocks that may leave are named once each."""
    monkeypatch.setattr(Contest, "asked", changing_at(Contest.asked, {40, 45, 90}))
    policy = Adaptive(CAPACITY)
    conductor = Conductor(policy)
    names = [chain(number, 1)[0] for number in range(CAPACITY)]
    for key in names:
        conductor.apply("admitted", key)
        conductor.apply("exposed", key)
    for key in names[::3]:
        conductor.apply("shielded", key)
    for key in names[::5]:
        conductor.apply("touched", key)
    left = set()
    while (victim := policy.next_victim()) is not None:
        conductor.apply("removed", victim)
        left.add(victim)
    assert left == set(names) - set(names[::3])
    assert policy.leader == "arc"


def changing_at(asked, moments):
    """A contest whose leader changes at these calls: a stand-in for shadows that disagree."""
    names = iter(("lru", "s3-fifo", "arc"))
    count = 0

    def changed(self: Contest, key: BlockKey, parent: BlockKey | None, tied: bool) -> bool:
        nonlocal count
        count += 1
        asked(self, key, parent, tied)
        if count in moments:
            self.leader = next(names)
        return count in moments

    return changed


# -- parts -------------------------------------------------------------------------------


def test_sketch_counts_what_is_asked_for_often_and_halves_it():
    sketch = Sketch(100)
    for _ in range(8):
        sketch.note(7)
    assert (sketch.count(7), sketch.count(8)) == (8, 0)
    for other in range(1000, 1992):
        sketch.note(other)
    assert sketch.count(7) == 4


def test_ghosts_forget_the_oldest_and_are_struck_off_once():
    ghosts = Ghosts(2)
    for ghost in (1, 2, 3):
        ghosts.remember(ghost)
    assert [ghosts.recall(ghost) for ghost in (1, 2, 2, 3)] == [False, True, False, True]
