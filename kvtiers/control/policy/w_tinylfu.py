"""W-TinyLFU: a new block stays only if it is asked for more often than what it would displace."""

from __future__ import annotations

from typing import Final

from kvtiers.control.policy.lines import Fifo, Line, Node, OnLines, RankedFifo, fingerprint
from kvtiers.control.policy.sketch import Sketch
from kvtiers.model.keys import BlockKey

_WINDOW_SHARE: Final = 0.01
_PROTECTED_SHARE: Final = 0.8  # of what the window leaves
# So often a block of the main part may win; else one with a high count that nobody asks for any
# longer keeps all others out. Less than 64 costs hits (conversation trace, November 2026).
_PATIENCE: Final = 256


class WTinyLFU(OnLines):
    """Admits to its main part by frequency (Einziger, Friedman and Manes, ACM TOS 2017).

    New blocks pass a small window in order of use. What overflows it competes with the block
    that would leave the main part next: the one that was asked for less often, by a sketch of
    all that was asked for, leaves. The main part is a segmented LRU. A block that has passed the
    window and may not leave yet competes when it may, or is hit and passes it again.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._window_capacity = max(1, int(capacity * _WINDOW_SHARE))
        self._main_capacity = capacity - self._window_capacity
        self._protected_capacity = int(self._main_capacity * _PROTECTED_SHARE)
        self._clock = 0
        self._window, self._protected = RankedFifo(), Fifo()
        self._losers, self._probation = Line(), Line()
        self._sketch = Sketch(capacity)

    def admitted(self, key: BlockKey, parent: BlockKey | None = None) -> None:  # noqa: ARG002
        """Put the block into the window."""
        self._sketch.note(fingerprint(key))
        node = self._nodes[key] = Node(key, self._window)
        self._clock += 1
        self._window.append(node, self._clock)
        if self._window.size > self._window_capacity:
            self._overflow()

    def touched(self, key: BlockKey) -> None:
        """Make the block the last of its part; what was hit in the main part is protected."""
        self._sketch.note(fingerprint(key))
        node = self._nodes[key]
        self._clock += 1
        if node.line is self._probation:
            self._protected.join(node, self._clock)
            if self._protected.size > self._protected_capacity:
                self._demote()
        elif node.line is self._protected:
            self._protected.append(node, self._clock)
        elif node.line is self._window:
            self._window.append(node, self._clock)
        else:
            self._window.join(node, self._clock)
            self._overflow()

    def next_victim(self) -> BlockKey | None:
        """Return a block that lost, else the next of the main part, else of the window."""
        if not self._num_exposed:
            return None
        if self._window.size >= self._window_capacity and not self._losers.size:
            self._overflow()
        while True:
            node = self._losers.first()
            if node is None and self._losers.size:
                follower = self._window.first()  # behind a loser, perhaps: that must wait for it
                if follower is not None:
                    self._compete(follower)
                    continue
            node = node or self._probation.first()
            if node is not None:
                return node.key
            if self._protected.size:
                self._demote()
            else:
                self._overflow()

    def _overflow(self) -> None:
        """Send the first of the window to the main part, or let it compete for a place there."""
        node = self._window.next_turn()
        if node is not None:
            self._compete(node)

    def _compete(self, node: Node) -> None:
        self._clock += 1
        size = self._probation.size + self._protected.size
        if size < self._main_capacity and len(self._nodes) < self._capacity:
            self._probation.join(node, self._clock)
            return
        victim = self._probation.first()
        if victim is None:
            self._losers.join(node, self._clock)
            return
        count = self._sketch.count
        more = count(fingerprint(node.key)) - count(fingerprint(victim.key))
        if more > 0:
            self._probation.join(node, self._clock)
            if size >= self._main_capacity:
                victim.uses = 0
                self._losers.join(victim, self._clock)
            return
        self._losers.join(node, self._clock)
        victim.uses += 1
        if victim.uses >= _PATIENCE:
            victim.uses = 0
            self._probation.join(victim, self._clock)

    def _demote(self) -> None:
        """End the protection of the block that was not hit for longest."""
        node = self._protected.next_turn()
        if node is not None:
            self._clock += 1
            self._probation.join(node, self._clock)
