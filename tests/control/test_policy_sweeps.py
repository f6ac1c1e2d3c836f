"""What rules hold beside their blocks is put away bit by bit, and nobody notices."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvtiers.control.policy.adaptive import RULES, Adaptive
from kvtiers.control.policy.lines import Fifo, Line, Node
from kvtiers.control.policy.lru import LRU
from kvtiers.control.policy.reuse_ages import NUM_CLASSES, ReuseAges
from kvtiers.control.policy.shadow import Contest
from kvtiers.control.policy.sketch import Sketch
from kvtiers.model.keys import BlockKey
from kvtiers.testing.policy_suite import keys

NUM_BLOCKS = 1500  # far more than the slack of a sweep


def churn(
    rng: random.Random, names: list[BlockKey], apply: Callable[[str, BlockKey], None], num: int
) -> None:
    """Expose, shield and touch; by turns most blocks may leave, and hardly any."""
    exposed: set[BlockKey] = set()
    for idx in range(num):
        key = names[rng.randrange(len(names))]
        shut = idx // 5000 % 2
        if rng.random() < 0.2:
            apply("touched", key)
        elif key in exposed and rng.random() < (0.9 if shut else 0.1):
            exposed.remove(key)
            apply("shielded", key)
        elif key not in exposed and rng.random() < (0.1 if shut else 0.9):
            exposed.add(key)
            apply("exposed", key)


@pytest.mark.parametrize("asked_every", [1, 97, 4001])
def test_lru_names_the_least_recently_used_while_it_sweeps(asked_every: int):
    policy, clock = LRU(), 0
    names = keys(*range(NUM_BLOCKS))
    used: dict[BlockKey, int] = {}
    exposed: set[BlockKey] = set()
    for key in names:
        policy.admitted(key)
        used[key] = clock = clock + 1

    def apply(operation: str, key: BlockKey) -> None:
        nonlocal clock
        getattr(policy, operation)(key)
        clock += 1
        if operation == "touched":
            used[key] = clock
        elif operation == "exposed":
            exposed.add(key)
        else:
            exposed.remove(key)
        if clock % asked_every == 0:
            assert policy.next_victim() == min(exposed, key=used.__getitem__, default=None)
            num_rows = len(policy._heap) + len(policy._unswept) + len(policy._new)
            assert len(policy._queued) == num_rows

    churn(random.Random(1), names, apply, 20_000)
    assert len(policy._queued) < NUM_BLOCKS + 2 * len(exposed) + 200


@pytest.mark.parametrize("asked_every", [1, 97, 4001])
def test_line_names_the_first_while_it_sweeps(asked_every: int):
    line, other, clock = Line(), Line(), 0
    names = keys(*range(NUM_BLOCKS))
    rng = random.Random(2)
    nodes: dict[BlockKey, Node] = {}
    for clock, key in enumerate(names):
        nodes[key] = Node(key, line, clock)

    def apply(operation: str, key: BlockKey) -> None:
        nonlocal clock
        clock += 1
        node = nodes[key]
        if operation == "touched" and rng.random() < 0.5:
            node.order = clock
        elif operation == "touched":
            (other if node.line is line else line).join(node, clock)
        elif operation == "exposed":
            node.line.expose(node)
        else:
            node.line.shield(node)
        if clock % asked_every == 0:
            for each in (line, other):
                here = [it for it in nodes.values() if it.line is each and it.exposed]
                assert each.first() is min(here, key=lambda it: it.order, default=None)
                assert each.num_exposed == len(here)

    churn(rng, names, apply, 20_000)
    for each in (line, other):
        assert each.size == sum(node.line is each for node in nodes.values())
        assert len(each._heap) + len(each._unswept) < 2 * NUM_BLOCKS


def test_line_makes_rows_for_blocks_that_stay_exposed_before_anybody_asks():
    line = Line()
    for order, key in enumerate(keys(*range(NUM_BLOCKS))):
        line.expose(Node(key, line, order))
    assert len(line._new) < NUM_BLOCKS // 2


def test_turns_come_in_order_while_the_given_up_ones_are_swept():
    rng = random.Random(3)
    line, gone = Fifo(), Fifo()
    waiting: list[Node] = []
    for clock in range(20_000):
        if waiting and rng.random() < 0.8:
            node = waiting.pop(rng.randrange(len(waiting)))
            line.append(node, clock)
        else:
            node = Node(keys(clock)[0], line)
            line.append(node, clock)
        waiting.append(node)
        if len(waiting) > 300:
            taken = line.next_turn()
            assert taken is waiting.pop(0)
            gone.join(taken, clock)
        assert len(line._turns) + len(line._swept) <= 2 * line.size + 70


def test_sketch_counts_alike_while_it_halves(monkeypatch):
    """A table of more than one part, of which counts are read and noted amid the halving."""
    monkeypatch.setattr("kvtiers.control.policy.sketch._HALVED_AT_ONCE", 64)  # it takes 400 notes
    sketch, rng = Sketch(100), random.Random(4)
    table = [0] * sketch._size
    left, halvings = 1000, 0
    for _ in range(4000):
        name = int(rng.paretovariate(0.5)) % 2**32
        places = {name % len(table), (name * 0x9E3779B1 >> 7 & 0xFFFFFFFF) % len(table)}
        low = min(table[place] for place in places)
        assert sketch.count(name) == low
        sketch.note(name)
        for place in places:
            if table[place] == low < 15:
                table[place] += 1
        left -= 1
        if not left:
            table = [count >> 1 for count in table]
            left, halvings = 500, halvings + 1
    assert halvings > 3


def test_class_that_the_sample_lacks_is_like_the_one_before():
    """Blocks asked for once come back; none was asked for often enough to be of a later class."""
    ages = ReuseAges(50)
    for clock in range(1, 3000):
        name = clock // 80 * 40 + clock % 40  # each key twice, 40 apart
        ages.note(name, clock)
    assert max(ages.rates[0]) > 0
    assert all(max(rates) > 0 for rates in ages.rates[1:]), ages.rates
    assert len(ages.rates) == NUM_CLASSES


@pytest.mark.parametrize("name", RULES)
def test_rule_that_is_given_up_shrinks_to_nothing(name: str):
    policy = RULES[name](200)
    for key in keys(*range(200)):
        policy.admitted(key)
        policy.exposed(key)
    policy.touched(keys(7)[0])
    assert policy.next_victim() is not None
    steps = 1
    while policy.shrink(8):
        steps += 1
    assert policy.next_victim() is None
    assert steps == 200 // 8


def test_adaptive_keeps_the_order_of_use_over_two_changes(monkeypatch):
    """One change follows while the first heir is told: LRU still learns who was used when."""
    calls = 0

    def changing(contest: Contest, *_: object) -> bool:
        nonlocal calls
        calls += 1
        if calls in (400, 410):
            contest.leader = "lru"
        return calls in (400, 410)

    monkeypatch.setattr(Contest, "asked", changing)
    policy = Adaptive(300)
    policy._stop_guessing()
    names = keys(*range(300))
    used: dict[BlockKey, int] = {}
    for clock, key in enumerate([*names, *names[::3]]):
        if key in used:
            policy.touched(key)
        else:
            policy.admitted(key)
            policy.exposed(key)
        used[key] = clock
    for clock in range(60):  # the last to be used are used again, while the heir is told
        key = names[297 - 3 * (clock % 3)]
        policy.touched(key)
        used[key] = 1000 + clock
    assert policy._heir is None
    for _ in range(290):
        victim = policy.next_victim()
        assert victim == min(used, key=used.__getitem__)
        policy.removed(victim)
        del used[victim]


def test_adaptive_gives_up_no_rule_at_once_however_soon_changes_follow(monkeypatch):
    """Who is given up forgets its blocks bit by bit: the leader, and heirs that never led."""
    calls, made, make = 0, [], Adaptive._make

    def changing(contest: Contest, *_: object) -> bool:
        nonlocal calls
        calls += 1
        return calls in (400, 410, 440, 480)

    def recorded(policy: Adaptive, name: str):
        made.append(make(policy, name))
        return made[-1]

    monkeypatch.setattr(Contest, "asked", changing)
    monkeypatch.setattr(Adaptive, "_make", recorded)
    policy = Adaptive(300)
    names = keys(*range(300))
    for key in names:
        policy.admitted(key)
        policy.exposed(key)
    most = 0
    for clock in range(500):
        policy.touched(names[clock % 300])
        most = max(most, sum(len(rule._nodes) for rule in made))
    assert len(made) == 5
    assert [len(rule._nodes) for rule in made] == [0, 0, 0, 0, 300]
    assert most <= 3 * 300  # leader, heir, and what is given up


def test_rows_of_blocks_that_came_and_went_are_forgotten_though_an_older_one_stays():
    policy, line = LRU(), Line()
    first, *others = keys(*range(5000))
    policy.admitted(first)
    policy.exposed(first)
    old = Node(first, line, 0)
    line.expose(old)
    for order, key in enumerate(others, start=1):
        policy.admitted(key)
        policy.exposed(key)
        assert policy.next_victim() == first
        policy.removed(key)
        node = Node(key, line, order)
        line.expose(node)
        assert line.first() is old
        line.drop(node)
        assert len(policy._heap) + len(policy._unswept) < 200
        assert len(line._heap) + len(line._unswept) < 200


def test_turns_of_few_blocks_that_are_hit_again_and_again_are_forgotten():
    rng = random.Random(5)
    line, gone = Fifo(), Fifo()
    nodes = [Node(key, line) for key in keys(*range(50))]
    for clock, node in enumerate(nodes):
        line.append(node, clock)
    for clock in range(50, 5000):
        line.append(nodes[rng.randrange(50)], clock)
        assert len(line._turns) + len(line._swept) <= 250
    for node in sorted(nodes, key=lambda it: it.order):
        assert line.next_turn() is node
        gone.join(node, 5000)
