"""Replacement rules against plain models of them: lists, one block at a time, all may leave."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Protocol

import pytest

from kvtiers.control.policy import make_policy
from kvtiers.control.policy.adaptive import Adaptive
from kvtiers.control.policy.base import EvictionPolicy
from kvtiers.control.policy.cost import Cost
from kvtiers.control.policy.lines import fingerprint
from kvtiers.control.policy.reuse_ages import bucket_of, class_of
from kvtiers.control.policy.shadow import Contest
from kvtiers.control.policy.sketch import Sketch
from kvtiers.model.keys import BlockKey
from kvtiers.testing.policy_suite import keys

CAPACITY = 40


class Model(Protocol):
    """A rule as its paper has it, over keys in lists, the first to leave first."""

    def hit(self, key: BlockKey) -> None: ...
    def insert(self, key: BlockKey) -> None: ...
    def evict(self) -> BlockKey: ...


class ModelLRU:
    def __init__(self) -> None:
        self.line: list[BlockKey] = []

    def hit(self, key: BlockKey) -> None:
        self.line.remove(key)
        self.line.append(key)

    def insert(self, key: BlockKey) -> None:
        self.line.append(key)

    def evict(self) -> BlockKey:
        return self.line.pop(0)


class ModelARC:
    def __init__(self) -> None:
        self.once: list[BlockKey] = []
        self.again: list[BlockKey] = []
        self.left_once: list[BlockKey] = []
        self.left_again: list[BlockKey] = []
        self.target = 0

    def hit(self, key: BlockKey) -> None:
        (self.once if key in self.once else self.again).remove(key)
        self.again.append(key)

    def insert(self, key: BlockKey) -> None:
        num_once, num_again = len(self.left_once), len(self.left_again)
        if key in self.left_once:
            self.target = min(CAPACITY, self.target + max(1, num_again // num_once))
            self.left_once.remove(key)
            self.again.append(key)
        elif key in self.left_again:
            self.target = max(0, self.target - max(1, num_once // num_again))
            self.left_again.remove(key)
            self.again.append(key)
        else:
            self.once.append(key)

    def evict(self) -> BlockKey:
        from_once = len(self.once) > self.target or not self.again
        key = (self.once if from_once else self.again).pop(0)
        if from_once:
            self.left_once.append(key)
            del self.left_once[: -(CAPACITY - len(self.once)) or None]
        else:
            self.left_again.append(key)
            resident = len(self.once) + len(self.again)
            room = min(CAPACITY, 2 * CAPACITY - resident - len(self.left_once))
            del self.left_again[:-room]
        return key


class ModelS3FIFO:
    def __init__(self) -> None:
        self.small: list[BlockKey] = []
        self.main: list[BlockKey] = []
        self.left: list[BlockKey] = []
        self.uses: dict[BlockKey, int] = {}

    def hit(self, key: BlockKey) -> None:
        self.uses[key] = min(3, self.uses[key] + 1)

    def insert(self, key: BlockKey) -> None:
        self.uses[key] = 0
        if key in self.left:
            self.left.remove(key)
            self.main.append(key)
        else:
            self.small.append(key)

    def evict(self) -> BlockKey:
        while True:
            if len(self.small) > CAPACITY // 10 or not self.main:
                key = self.small.pop(0)
                if not self.uses[key]:
                    self.left = [*self.left, key][-CAPACITY:]
                    return key
                self.uses[key] = 0
                self.main.append(key)
                continue
            key = self.main.pop(0)
            if not self.uses[key]:
                return key
            self.uses[key] -= 1
            self.main.append(key)


class ModelWTinyLFU:
    WINDOW, MAIN, PROTECTED = 1, 39, 31

    def __init__(self) -> None:
        self.window: list[BlockKey] = []
        self.probation: list[BlockKey] = []
        self.protected: list[BlockKey] = []
        self.wins: dict[BlockKey, int] = {}
        self.sketch = Sketch(CAPACITY)
        self.loser: BlockKey | None = None

    def hit(self, key: BlockKey) -> None:
        self.sketch.note(fingerprint(key))
        if key in self.window:
            self.window.remove(key)
            self.window.append(key)
            return
        (self.probation if key in self.probation else self.protected).remove(key)
        self.protected.append(key)
        if len(self.protected) > self.PROTECTED:
            self.probation.append(self.protected.pop(0))

    def insert(self, key: BlockKey) -> None:
        self.sketch.note(fingerprint(key))
        self.window.append(key)
        if len(self.window) > self.WINDOW:
            self._compete(self.window.pop(0))

    def evict(self) -> BlockKey:
        if self.loser is None and len(self.window) >= self.WINDOW:
            self._compete(self.window.pop(0))
        if self.loser is not None:
            loser, self.loser = self.loser, None
            return loser
        if not self.probation:
            self.probation.append(self.protected.pop(0))
        return self.probation.pop(0)

    def _compete(self, key: BlockKey) -> None:
        in_main = len(self.probation) + len(self.protected)
        here = in_main + len(self.window) + 1
        if in_main < self.MAIN and here < CAPACITY:
            self.probation.append(key)
            return
        if not self.probation:
            self.loser = key
            return
        other = self.probation[0]
        count = self.sketch.count
        if count(fingerprint(key)) > count(fingerprint(other)):
            self.probation.append(key)
            if in_main >= self.MAIN:
                self.loser = self.probation.pop(0)
                self.wins.pop(other, None)
            return
        self.loser = key
        self.wins[other] = self.wins.get(other, 0) + 1
        if self.wins[other] >= 256:
            del self.wins[other]
            self.probation.append(self.probation.pop(0))


MODELS: dict[str, Callable[[], Model]] = {
    "lru": ModelLRU,
    "arc": ModelARC,
    "s3-fifo": ModelS3FIFO,
    "w-tinylfu": ModelWTinyLFU,
}


def requests(seed: int, num: int = 6000) -> Iterator[BlockKey]:
    """Popular keys, scans, and keys that come back after a while, by turns."""
    rng = random.Random(seed)
    names = keys(*range(400))
    for idx in range(num):
        phase = idx // 500 % 3
        if phase == 0:
            yield names[min(int(rng.paretovariate(0.7)), 120)]
        elif phase == 1:
            yield names[150 + (idx * 2 + rng.randrange(60)) % 250]
        else:
            yield names[rng.randrange(70)]


def ask(policy: EvictionPolicy, resident: set[BlockKey], key: BlockKey) -> BlockKey | None:
    """Hit a block, or let it in; returns who left."""
    if key in resident:
        policy.touched(key)
        return None
    victim = None
    if len(resident) >= CAPACITY:
        victim = policy.next_victim()
        assert victim is not None
        policy.removed(victim)
        resident.remove(victim)
    policy.admitted(key)
    policy.exposed(key)
    resident.add(key)
    return victim


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MODELS)
def test_victims_are_those_of_the_model(name: str, seed: int) -> None:
    policy, model = make_policy(name, CAPACITY), MODELS[name]()
    resident: set[BlockKey] = set()
    for key in requests(seed):
        if key in resident:
            model.hit(key)
            expected = None
        else:
            expected = model.evict() if len(resident) >= CAPACITY else None
            model.insert(key)
        assert ask(policy, resident, key) == expected


@pytest.mark.parametrize("seed", range(3))
def test_cost_names_the_end_of_a_class_that_promises_least(seed: int) -> None:
    """Of each class of blocks, by uses, the one used first and the one used last are compared."""
    worth = {key: 1.0 + number % 3 for number, key in enumerate(keys(*range(400)))}
    policy = Cost(CAPACITY, worth.__getitem__)
    memory = policy._memory
    used: dict[BlockKey, tuple[int, int]] = {}  # when last, how often
    resident: set[BlockKey] = set()
    for now, key in enumerate(requests(seed), start=1):
        full = key not in resident and len(resident) >= CAPACITY
        ends: dict[int, list[BlockKey]] = {}
        for other in sorted(resident, key=lambda other: used[other][0]):
            ends.setdefault(class_of(used[other][1]), []).append(other)
        rows = [(line[end], name) for name, line in ends.items() for end in (0, -1)]
        promises = {
            other: memory.ages.rates[name][bucket_of(now - 1 - used[other][0])] * worth[other]
            for other, name in rows
        }
        hit = key in resident
        victim = ask(policy, resident, key)
        if full:
            least = min(promises.values())
            worst = [other for other, promise in promises.items() if promise == least]
            assert victim == min(worst, key=lambda other: used[other][0])
        times = used[key][1] + 1 if hit else max(1, memory.uses(fingerprint(key)))
        used[key] = (now, times)


def test_adaptive_is_its_leader_while_nobody_does_better(monkeypatch):
    monkeypatch.setattr(Contest, "asked", lambda self, key, parent, tied: False)
    policy = Adaptive(CAPACITY)
    policy._stop_guessing()  # which block follows which
    policies = [policy, make_policy("cost", CAPACITY)]
    resident: list[set[BlockKey]] = [set(), set()]
    for key in requests(5):
        left = [ask(policy, here, key) for policy, here in zip(policies, resident, strict=True)]
        assert left[0] == left[1]


def test_adaptive_is_the_new_leader_once_it_knows_all_blocks(monkeypatch):
    """Told of the blocks in their order of use, LRU names who an LRU from the start would."""

    def change_at_1000(contest: Contest, *_: object) -> bool:
        nonlocal count
        count += 1
        if count == 1000:
            contest.leader = "lru"
        return count == 1000

    count = 0
    monkeypatch.setattr(Contest, "asked", change_at_1000)
    policy = Adaptive(CAPACITY)
    policy._stop_guessing()
    resident: set[BlockKey] = set()
    used: dict[BlockKey, int] = {}
    for now, key in enumerate(requests(6)):
        oldest = min(resident, key=used.__getitem__) if len(resident) >= CAPACITY else None
        victim = ask(policy, resident, key)
        used[key] = now
        if victim is not None and now > 1000 + CAPACITY:
            assert victim == oldest
