"""S3-FIFO: three queues in order of arrival, of which the small one lets most blocks go."""

from __future__ import annotations

from typing import Final

from kvtiers.control.policy.ghosts import Ghosts
from kvtiers.control.policy.lines import Fifo, Line, Node, OnLines, fingerprint
from kvtiers.model.keys import BlockKey

_SMALL_SHARE: Final = 0.1
_MOST_USES: Final = 3


class S3FIFO(OnLines):
    """Lets a new block prove itself in a tenth of the tier (Yang and others, SOSP 2023).

    Blocks take turns in the order in which they came. One that was hit before its turn goes on
    to the main queue; one that comes back soon after it left begins there. In the main queue each
    hit, three at most, earns another round. A turn comes whether the block may leave or not: one
    whose turn has passed leaves as soon as it may, or is hit and goes to the main queue.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._small_capacity = max(1, int(capacity * _SMALL_SHARE))
        self._clock = 0
        self._small, self._main = Fifo(), Fifo()
        self._small_due, self._main_due = Line(), Line()
        self._left = Ghosts(capacity)

    def admitted(self, key: BlockKey, parent: BlockKey | None = None) -> None:  # noqa: ARG002
        """Queue the block, in the main queue if it left the small one lately."""
        self._clock += 1
        line = self._main if self._left.recall(fingerprint(key)) else self._small
        node = self._nodes[key] = Node(key, line)
        line.append(node, self._clock)

    def touched(self, key: BlockKey) -> None:
        """Count a hit; the block keeps its place in a queue."""
        node = self._nodes[key]
        if node.line is self._small_due or node.line is self._main_due:
            self._clock += 1
            self._main.join(node, self._clock)
        elif node.uses < _MOST_USES:
            node.uses += 1

    def removed(self, key: BlockKey) -> None:
        """Remember a block that leaves the small queue."""
        node = self._drop(key)
        if node.line is self._small_due:
            self._left.remember(fingerprint(key))

    def next_victim(self) -> BlockKey | None:
        """Return the first block whose turn has passed, taking turns until there is one."""
        if not self._num_exposed:
            return None
        while True:
            node = self._small_due.first() or self._main_due.first()
            if node is not None:
                return node.key
            self._take_turn()

    def _take_turn(self) -> None:
        self._clock += 1
        small, main = self._small, self._main
        if small.size > self._small_capacity or not main.size:
            node = small.next_turn()
            if node is not None:
                line = main if node.uses else self._small_due
                node.uses = 0
                line.join(node, self._clock)
            return
        node = main.next_turn()
        if node is not None and node.uses:
            node.uses -= 1
            main.append(node, self._clock)
        elif node is not None:
            self._main_due.join(node, self._clock)
