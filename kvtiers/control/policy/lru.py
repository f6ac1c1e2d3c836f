"""Least recently used."""

from __future__ import annotations

from kvtiers.control.policy.lines import Line, Node
from kvtiers.model.keys import BlockKey


class LRU:
    """Evicts the exposed block whose last use lies furthest back."""

    def __init__(self) -> None:
        self._clock = 0
        self._nodes: dict[BlockKey, Node] = {}
        self._line = Line()

    def admitted(self, key: BlockKey) -> None:
        """Count residence as the first use."""
        self._clock += 1
        self._nodes[key] = Node(key, self._line, self._clock)

    def touched(self, key: BlockKey) -> None:
        """Make the block the most recently used."""
        self._clock += 1
        self._nodes[key].order = self._clock

    def exposed(self, key: BlockKey) -> None:
        """Rank the block by its last use, not by the time of its exposure."""
        self._line.expose(self._nodes[key])

    def shielded(self, key: BlockKey) -> None:
        """Take the block out of the running; its last use is kept."""
        self._line.shield(self._nodes[key])

    def removed(self, key: BlockKey) -> None:
        """Drop all that is known of the block."""
        self._line.drop(self._nodes.pop(key))

    def next_victim(self) -> BlockKey | None:
        """Return the least recently used exposed block."""
        node = self._line.first()
        return None if node is None else node.key
