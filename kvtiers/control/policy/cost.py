"""By value: the seconds that a block saves, by its chance to be asked for again."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from typing import Final

from kvtiers.control.policy.lines import Line, Node, OnLines, fingerprint
from kvtiers.control.policy.reuse_ages import NUM_CLASSES, ReuseAges, bucket_of, class_of
from kvtiers.control.policy.sketch import Sketch
from kvtiers.model.keys import BlockKey

Value = Callable[[BlockKey], float]

_NEWEST: Final = 64


class Memory:
    """What is known of keys, whether their blocks are here or gone.

    Attributes:
        clock: notes so far. ages: what they say of keys that are asked for again.
    """

    def __init__(self, capacity: int) -> None:
        self.clock = 0
        self.ages = ReuseAges(capacity)
        self._sketch = Sketch(capacity)

    def note(self, fingerprint: int) -> None:
        """Note that a key was asked for."""
        self.clock += 1
        self._sketch.note(fingerprint)
        self.ages.note(fingerprint, self.clock)

    def uses(self, fingerprint: int) -> int:
        """Return how often a key was asked for of late."""
        return self._sketch.count(fingerprint)


class Ends(Line):
    """Blocks in order of use, of which the first and the last that may leave are wanted.

    The last is looked for among those that were exposed or used of late: so many are ranked that
    the next of them takes over when it leaves, and so few that a sweep is short.

    Attributes:
        oldest: the first, when it was looked for last. promise: what it does. until: the clock up
            to which that holds, if nothing happens to it. rates: by which it was found.
    """

    __slots__ = ("_newest", "oldest", "promise", "rates", "until")

    def __init__(self) -> None:
        super().__init__()
        self._newest: list[tuple[int, Node]] = []  # the last at the end
        self.oldest: Node | None = None
        self.promise = math.inf
        self.until = 0
        self.rates: list[float] = []

    def expose(self, node: Node) -> None:
        """Let a block of this line leave from now on."""
        Line.expose(self, node)
        self._rank_newest(node)
        if self.oldest is None or node.order < self.oldest.order:
            self.until = 0

    def shield(self, node: Node) -> None:
        """Let a block stay."""
        Line.shield(self, node)
        if node is self.oldest:
            self.oldest, self.until = None, 0

    def use(self, node: Node, order: int) -> None:
        """Give a block of this line a later place."""
        node.order = order
        if node.exposed:
            self._rank_newest(node)
            if node is self.oldest:
                self.until = 0

    def rank_oldest(self, now: int, rates: list[float], value: Value | None) -> None:
        """Look for the first, and for what it promises.

        Args:
            rates: of reuse, by bucket of age. value: see `Cost`.
        """
        self.oldest = node = self.first()
        self.rates, self.promise, self.until = rates, math.inf, 0
        if node is not None:
            age = now - node.order
            exponent = max(0, age.bit_length() - 3)
            self.until = node.order + ((age >> exponent) + 1 << exponent)  # of its bucket
            self.promise = rates[bucket_of(age)]
            if value is not None:
                self.promise *= value(node.key)

    def last(self) -> Node | None:
        """Return the last block that may leave, None when none of late may."""
        newest = self._newest
        while newest:
            order, node = newest[-1]
            if node.exposed and node.line is self and node.order == order:
                return node
            newest.pop()
        return None

    def _rank_newest(self, node: Node) -> None:
        newest, order = self._newest, node.order
        if not newest or order >= newest[-1][0]:
            newest.append((order, node))
        else:
            bisect.insort(newest, (order, node))
        if len(newest) > 2 * _NEWEST:
            kept = {
                node: (order, node)
                for order, node in newest
                if node.exposed and node.line is self and node.order == order
            }
            self._newest = list(kept.values())[-_NEWEST:]


class Cost(OnLines):
    """Evicts what promises the least: seconds saved times the rate at which such blocks return.

    Blocks are told apart by how often they were asked for and how long ago; see `ReuseAges`. Of
    each class, the least and the most recently used block that may leave are compared.

    Args:
        value: seconds that the reload of a block saves; all the same if not given.
        memory: of keys, here and gone, whose owner notes what is asked for; else its own.
        name: by which a memory knows a key; its fingerprint unless the keys are stand-ins.
    """

    def __init__(
        self,
        capacity: int,
        value: Value | None = None,
        memory: Memory | None = None,
        name: Callable[[BlockKey], int] = fingerprint,
    ) -> None:
        super().__init__()
        self._value = value
        self._lines = [Ends() for _ in range(NUM_CLASSES)]
        self._memory = memory or Memory(capacity)
        self._notes = memory is None
        self._name = name

    def admitted(self, key: BlockKey, parent: BlockKey | None = None) -> None:  # noqa: ARG002
        """Count residence as a use, beside those before it."""
        name = self._name(key)
        if self._notes:
            self._memory.note(name)
        uses = self._memory.uses(name) or 1
        node = Node(key, self._lines[class_of(uses)], self._memory.clock)
        node.uses = uses
        self._nodes[key] = node

    def touched(self, key: BlockKey) -> None:
        """Count a use."""
        if self._notes:
            self._memory.note(self._name(key))
        node = self._nodes[key]
        node.uses += 1
        line = self._lines[class_of(node.uses)]
        if line is node.line:
            line.use(node, self._memory.clock)
        else:
            line.join(node, self._memory.clock)

    def next_victim(self) -> BlockKey | None:
        """Return the block that promises least; the least recently used of equals."""
        worst: Node | None = None
        least = math.inf
        memory, value = self._memory, self._value
        now = memory.clock
        for line, rates in zip(self._lines, memory.ages.rates, strict=True):
            if not line.num_exposed:
                continue
            if now >= line.until or line.rates is not rates:
                line.rank_oldest(now, rates, value)
            node, promise = line.oldest, line.promise
            if node is not None and (
                promise < least or (promise == least and worst and node.order < worst.order)
            ):
                worst, least = node, promise
            last = line.last()
            if last is None or last is node:
                continue
            age = now - last.order
            exponent = age.bit_length() - 3  # `bucket_of`, without a call
            promise = rates[age if exponent < 0 else 4 * exponent + (age >> exponent)]
            if value is not None:
                promise *= value(last.key)
            if promise < least or (promise == least and worst and last.order < worst.order):
                worst, least = last, promise
        return None if worst is None else worst.key
