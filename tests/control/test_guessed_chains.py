"""Chains that nobody tells of are guessed from the order of requests, and leave tail first."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.control.policy import make_policy
from kvtiers.control.policy.adaptive import Adaptive
from kvtiers.control.policy.base import EvictionPolicy
from kvtiers.control.policy.guessed_chains import GuessedChains, Predecessors
from kvtiers.control.policy.lines import fingerprint
from kvtiers.control.policy.lru import LRU
from kvtiers.control.policy.shadow import Shadow
from kvtiers.model.keys import BlockKey
from kvtiers.testing.policy_suite import keys

CAPACITY = 64


class Chained:
    """An LRU over guessed chains, all of whose blocks may leave."""

    def __init__(self) -> None:
        self.rule = LRU()
        self.chains = GuessedChains(self.rule.exposed, self.rule.shielded)
        self.here: set[BlockKey] = set()

    def ask(self, prompt: Iterable[BlockKey]) -> None:
        """Ask for the blocks of a prompt, and let in those that are not here."""
        goes_on = False
        for key in prompt:
            self.one(key, goes_on)
            goes_on = True

    def one(self, key: BlockKey, goes_on: bool) -> None:
        if key in self.here:
            self.rule.touched(key)
            self.chains.asked(key, goes_on)
            return
        self.here.add(key)
        self.rule.admitted(key)
        self.chains.came(key, goes_on)
        self.chains.exposed(key)

    def drop(self, key: BlockKey) -> None:
        self.here.discard(key)
        self.rule.removed(key)
        self.chains.left(key)

    def order_of_leaving(self) -> list[BlockKey]:
        order = []
        while (victim := self.chains.next_victim(self.rule)) is not None:
            order.append(victim)
            self.drop(victim)
        return order


# -- what goes on with a prompt ----------------------------------------------------------------


def test_key_that_comes_behind_another_than_before_begins_a_prompt():
    predecessors = Predecessors(CAPACITY)
    guessed = [predecessors.asked(name) for name in (1, 2, 3, 1, 2, 4, 1, 2, 3)]
    assert guessed == [False, True, True, False, True, True, False, True, True]


def test_key_that_is_asked_for_twice_in_a_row_is_no_other_prompt():
    predecessors = Predecessors(CAPACITY)
    assert [predecessors.asked(name) for name in (1, 2, 2, 3)] == [False, True, True, True]
    assert [predecessors.asked(name) for name in (1, 2, 3)] == [False, True, True]


def test_prompt_that_ends_is_found_at_every_length():
    """The first keys of prompts that were seen twice are known, whatever comes before them."""
    rng = random.Random(3)
    prompts = [
        [1 + 100 * number + depth for depth in range(rng.randrange(1, 9))] for number in range(9)
    ]
    predecessors = Predecessors(1000)
    order = [rng.randrange(9) for _ in range(200)]
    for turn, number in enumerate(order):
        guessed = [predecessors.asked(name) for name in prompts[number]]
        if order[:turn].count(number) > 1 and number != order[turn - 1]:
            assert guessed == [False] + [True] * (len(guessed) - 1)


def test_run_of_new_keys_is_cut():
    """Else prompts that all are new would be one, of which the newest left first."""
    predecessors = Predecessors(CAPACITY)
    guessed = [predecessors.asked(name) for name in range(1, 16)]
    assert guessed.count(False) == 3
    assert [predecessors.asked(name) for name in range(1, 16)] == [False, *[True] * 14]


# -- who leaves --------------------------------------------------------------------------------


def test_chain_leaves_tail_first_though_its_head_was_used_first():
    chained = Chained()
    first, second, third, other = keys(1, 2, 3, 4)
    chained.ask([first, second, third])
    chained.ask([other])
    assert chained.order_of_leaving() == [third, second, first, other]


def test_branches_leave_before_what_both_follow():
    chained = Chained()
    head, one, two, last = keys(1, 2, 3, 4)
    chained.ask([head, one])
    chained.ask([head, two])
    chained.ask([last])
    assert chained.order_of_leaving() == [one, two, head, last]


def test_block_behind_one_that_is_gone_leaves_first_until_that_comes_back():
    chained = Chained()
    old, head, tail, end = keys(1, 2, 3, 4)
    chained.ask([old])
    chained.ask([head])
    chained.drop(head)
    chained.one(tail, goes_on=True)
    chained.one(end, goes_on=True)
    assert chained.chains.next_victim(chained.rule) == tail
    chained.ask([head, tail, end])
    assert chained.order_of_leaving()[0] == old


def test_block_that_turns_out_to_begin_a_prompt_holds_nobody_back():
    chained = Chained()
    before, head = keys(1, 2)
    chained.ask([before, head])
    assert chained.chains.next_victim(chained.rule) == head
    chained.ask([before])
    chained.ask([head])
    assert chained.order_of_leaving() == [before, head]


def test_all_are_named_by_the_rule_once_they_are_released():
    chained = Chained()
    names = keys(*range(20))
    chained.ask(names)
    steps = 1
    while chained.chains.release(4):
        steps += 1
    assert steps == 5  # nineteen were held
    assert chained.order_of_leaving() == names


@given(st.lists(st.tuples(st.integers(0, 7), st.sampled_from("aAesr")), max_size=60))
def test_one_of_those_that_may_leave_is_named_whatever_follows_what(steps):
    """However wrong the guesses are; the rule is told nothing that contradicts itself."""
    rule = CheckedLRU()
    chains = GuessedChains(rule.exposed, rule.shielded)
    here, exposed = set(), set()
    names = keys(*range(8))
    for number, step in steps:
        key = names[number]
        if step in "aA" and key in here:
            rule.touched(key)
            chains.asked(key, step == "A")
        elif step in "aA":
            here.add(key)
            rule.admitted(key)
            chains.came(key, step == "A")
        elif step == "e" and key in here - exposed:
            exposed.add(key)
            chains.exposed(key)
        elif step == "s" and key in exposed:
            exposed.discard(key)
            chains.shielded(key)
        elif step == "r" and key in here:
            here.discard(key)
            exposed.discard(key)
            rule.removed(key)
            chains.left(key)
        victim = chains.next_victim(rule)
        assert (victim in exposed) if exposed else (victim is None)
        assert chains.next_victim(rule) == victim


class CheckedLRU(LRU):
    """An LRU that nobody tells twice what it knows."""

    def exposed(self, key: BlockKey) -> None:
        assert key in self._last_use
        assert key not in self._exposed
        super().exposed(key)

    def shielded(self, key: BlockKey) -> None:
        assert key in self._exposed or key not in self._last_use  # else it is about to leave
        super().shielded(key)


# -- in `adaptive` -----------------------------------------------------------------------------


def plain_hits(policy: EvictionPolicy, prompts: Sequence[Sequence[BlockKey]], room: int) -> int:
    """Leading blocks that a cache has whose owner tells of no chains; all blocks may leave."""
    here: set[BlockKey] = set()
    hits = 0
    for prompt in prompts:
        hits += next((n for n, key in enumerate(prompt) if key not in here), len(prompt))
        for key in prompt:
            if key in here:
                policy.touched(key)
                continue
            victim = policy.next_victim() if len(here) >= room else None
            if victim is not None:
                policy.removed(victim)
                here.remove(victim)
            policy.admitted(key)
            policy.exposed(key)
            here.add(key)
    return hits


def chats(seed: int, num: int = 1500) -> list[list[BlockKey]]:
    """Twelve chats at once that begin alike, grow by a few blocks each turn and are given up."""
    rng = random.Random(seed)
    fresh = iter(range(1000, 1_000_000))
    texts = [[0] for _ in range(12)]
    prompts = []
    for _ in range(num):
        idx = rng.randrange(12)
        if len(texts[idx]) > 20:
            texts[idx] = [0]
        texts[idx] += [next(fresh) for _ in range(rng.randrange(1, 4))]
        prompts.append(texts[idx])
    return [keys(*text) for text in prompts]


@pytest.mark.parametrize("seed", range(3))
def test_guessed_chains_bring_hits_that_the_rule_alone_loses(seed):
    prompts = chats(seed)
    alone = plain_hits(make_policy("cost", CAPACITY), prompts, CAPACITY)
    assert plain_hits(Adaptive(CAPACITY), prompts, CAPACITY) > 1.1 * alone


def test_whole_shadow_that_guesses_has_the_hits_of_its_cache():
    """The shadow of the leader, and the tier itself, see the same keys and guess the same."""
    prompts = chats(4)
    policy = Adaptive(CAPACITY)
    policy._contest._until_judged = 10**9
    expected = plain_hits(policy, prompts, CAPACITY)
    assert policy._contest._shadows["cost"].num_hits == pytest.approx(expected, rel=0.05)


def test_shadow_that_guesses_counts_no_key_behind_one_that_it_lacks():
    shadow = Shadow(3, make_policy("lru", 3), guesses=True)
    first, second, third = keys(1, 2, 3)
    shadow.ask([second, third], first, tied=False, goes_on=False)
    assert shadow.num_hits == 0
    shadow.ask([first, second, third], None, tied=False, goes_on=False)
    assert shadow.num_hits == 0
    shadow.ask([first, second], None, tied=False, goes_on=False)
    shadow.ask([third], second, tied=False, goes_on=True)
    assert (shadow.num_hits, shadow.num_leading) == (3, 3)


def test_shadow_that_guesses_lets_tails_leave_first():
    shadow = Shadow(3, make_policy("lru", 3), guesses=True)
    prompt = keys(1, 2, 3)
    shadow.ask(prompt, None, tied=False, goes_on=False)
    shadow.ask(keys(4), None, tied=False, goes_on=False)
    shadow.ask(prompt, None, tied=False, goes_on=False)
    assert shadow.num_leading == 2


def test_adaptive_that_is_told_of_chains_guesses_no_longer():
    """What it held back by then is named by its leader soon after."""
    policy = Adaptive(CAPACITY)
    names = keys(*range(40))
    for key in names:
        policy.admitted(key)
        policy.exposed(key)
    assert policy.next_victim() != names[0]
    told, tail = keys(100, 101)
    policy.admitted(told, names[0])
    for _ in range(10):
        policy.touched(told)
    policy.admitted(tail, told)
    order = []
    while (victim := policy.next_victim()) is not None:
        order.append(victim)
        policy.removed(victim)
    assert order == names
    assert policy._chains is None


def test_no_key_is_kept_of_what_is_gone():
    policy = Adaptive(CAPACITY)
    for number in range(2000):
        (key,) = keys(number)
        policy.admitted(key)
        policy.removed(key)
    assert policy._chains is not None
    assert not policy._chains._links
    assert fingerprint(key) == policy._predecessors._last
