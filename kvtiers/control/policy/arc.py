"""Adaptive replacement cache: the balance of recency and frequency, learnt from what left."""

from __future__ import annotations

from kvtiers.control.policy.ghosts import Ghosts
from kvtiers.control.policy.lines import Line, Node, OnLines, fingerprint
from kvtiers.model.keys import BlockKey


class ARC(OnLines):
    """Keeps what was used once apart from what was used again, and shifts room between both.

    Each has a list of what left it lately. A block that returns from the list of one asks for
    more room there (Megiddo and Modha, FAST 2003).
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._clock = 0
        self._once, self._again = Line(), Line()
        self._left_once, self._left_again = Ghosts(capacity), Ghosts(capacity)
        self._target = 0  # blocks that were used once, of all

    def admitted(self, key: BlockKey, parent: BlockKey | None = None) -> None:  # noqa: ARG002
        """Take a block that left lately among those used again, and learn from it."""
        self._clock += 1
        ghost = fingerprint(key)
        line = self._again
        num_once, num_again = len(self._left_once), len(self._left_again)
        if self._left_once.recall(ghost):
            more = max(1, num_again // num_once)
            self._target = min(self._target + more, self._capacity)
        elif self._left_again.recall(ghost):
            less = max(1, num_once // num_again)
            self._target = max(self._target - less, 0)
        else:
            line = self._once
        self._nodes[key] = Node(key, line, self._clock)

    def touched(self, key: BlockKey) -> None:
        """Make the block the last of those used again."""
        self._clock += 1
        node = self._nodes[key]
        if node.line is self._again:
            node.order = self._clock
        else:
            self._again.join(node, self._clock)

    def removed(self, key: BlockKey) -> None:
        """Remember that the block was here, and how it was used."""
        node = self._drop(key)
        if node.line is self._once:
            room = self._capacity - self._once.size
            self._left_once.remember(fingerprint(key), room)
        else:
            room = 2 * self._capacity - len(self._nodes) - len(self._left_once)
            self._left_again.remember(fingerprint(key), room)

    def next_victim(self) -> BlockKey | None:
        """Return the oldest block of the part that has more than its share."""
        lines = (self._once, self._again)
        if self._once.size <= self._target:
            lines = (self._again, self._once)
        node = lines[0].first() or lines[1].first()
        return None if node is None else node.key
