"""What the replacement rules are made of: lines of blocks, of which some may not leave."""

from __future__ import annotations

import heapq
import zlib
from collections import deque
from typing import Final

from kvtiers.model.keys import BlockKey

_GONE: Final = -1
_NO_KEY: Final = BlockKey(b"")
_SLACK: Final = 64  # stale rows that are not worth a rebuild

# 32 bits of a key. What is gone is remembered by it: nothing refers to the key of a block that
# left. With a million remembered, one in 4,000 new keys is taken for an old one.
fingerprint = zlib.crc32


class Node:
    """One resident block as a rule sees it.

    Attributes:
        order: its place in its line; it only ever grows. exposed: whether it may leave.
        uses: hits that the rule counts, by its own bounds.
        queued: whether a row of its line is its own, or is about to be.
    """

    __slots__ = ("exposed", "key", "line", "order", "queued", "uses")

    def __init__(self, key: BlockKey, line: Line, order: int = 0) -> None:
        self.key = key
        self.line = line
        self.order = order
        self.exposed = False
        self.queued = False
        self.uses = 0
        line.size += 1

    def __lt__(self, other: Node) -> bool:
        """Rank none of two that share a place before the other."""
        return False


class Line:
    """Blocks in order, of which the first that may leave is wanted.

    A heap of (order, node) of those that are or were exposed. A row's order may lag behind its
    node's, which only grows, and is put right when the row surfaces. Rows of others surface too,
    and are swept when they outnumber the exposed: O(log n) a change, and a hit costs nothing.
    Rows are made when somebody asks: most blocks of a chain that grows are exposed for a step.

    Attributes:
        size: blocks in it, exposed or not.
    """

    __slots__ = ("_heap", "_new", "num_exposed", "size")

    def __init__(self) -> None:
        self.size = 0
        self.num_exposed = 0
        self._heap: list[tuple[int, Node]] = []
        self._new: list[Node] = []  # that have no row yet

    def expose(self, node: Node) -> None:
        """Let a block of this line leave from now on."""
        node.exposed = True
        self.num_exposed += 1
        if not node.queued:
            node.queued = True
            self._new.append(node)

    def shield(self, node: Node) -> None:
        """Let a block stay."""
        node.exposed = False
        self.num_exposed -= 1
        if len(self._heap) + len(self._new) > 2 * self.num_exposed + _SLACK:
            self._sweep()

    def join(self, node: Node, order: int) -> None:
        """Take a block of another line, at a new place."""
        old = node.line
        old.size -= 1
        self.size += 1
        node.line, node.order = self, order
        node.queued = False
        if node.exposed:
            old.shield(node)
            self.expose(node)

    def drop(self, node: Node) -> None:
        """Forget a block that is gone; its line stays on record."""
        self.size -= 1
        if node.exposed:
            self.shield(node)
        node.order, node.key = _GONE, _NO_KEY

    def first(self) -> Node | None:
        """Return the first block that may leave."""
        heap = self._heap
        if self._new:
            for node in self._take_new():
                heapq.heappush(heap, (node.order, node))
        while heap:
            order, node = heap[0]
            if node.line is not self or not node.exposed:
                heapq.heappop(heap)
                node.queued &= node.line is not self
            elif node.order != order:
                heapq.heapreplace(heap, (node.order, node))
            else:
                return node
        return None

    def _take_new(self) -> list[Node]:
        """Return those without a row that may leave; the others need none."""
        new, self._new = self._new, []
        kept = []
        for node in new:
            if node.line is self:
                if node.exposed:
                    kept.append(node)
                else:
                    node.queued = False
        return kept

    def _sweep(self) -> None:
        self._new = self._take_new()
        kept: dict[Node, tuple[int, Node]] = {}
        for _, node in self._heap:
            if node.line is self:
                node.queued = node.exposed
                if node.exposed:
                    kept[node] = (node.order, node)
        self._heap = list(kept.values())
        heapq.heapify(self._heap)


class Fifo(Line):
    """Blocks in order, each of which has its turn, whether it may leave or not.

    Whose turn is taken is meant for another line. O(1) a change; nobody asks it who may leave.
    """

    __slots__ = ("_turns",)

    def __init__(self) -> None:
        super().__init__()
        self._turns: deque[tuple[int, Node]] = deque()

    def expose(self, node: Node) -> None:
        """Note that the block may leave."""
        node.exposed = True

    def shield(self, node: Node) -> None:
        """Note that the block stays."""
        node.exposed = False

    def join(self, node: Node, order: int) -> None:
        """Take a block of another line, at the end of this one."""
        super().join(node, order)
        self.append(node, order)

    def append(self, node: Node, order: int) -> None:
        """Put a block of this line at its end."""
        node.order = order
        turns = self._turns
        turns.append((order, node))
        if len(turns) > 2 * self.size + _SLACK:
            self._turns = deque(turn for turn in turns if self._waits(turn))

    def next_turn(self) -> Node | None:
        """Take the turn of the first block; it is of this line until another takes it."""
        turns = self._turns
        while turns:
            turn = turns.popleft()
            if self._waits(turn):
                return turn[1]
        return None

    def _waits(self, turn: tuple[int, Node]) -> bool:
        order, node = turn
        return node.line is self and node.order == order


class RankedFifo(Fifo):
    """Blocks that have turns, of which the first that may leave is wanted, too."""

    __slots__ = ()

    expose = Line.expose
    shield = Line.shield


class OnLines:
    """What rules whose blocks stand in lines share: which of them may leave.

    Their owner makes the nodes, in `admitted`.
    """

    def __init__(self) -> None:
        self._nodes: dict[BlockKey, Node] = {}
        self._num_exposed = 0

    def exposed(self, key: BlockKey) -> None:
        """Let the block leave when its rule says so."""
        node = self._nodes[key]
        node.line.expose(node)
        self._num_exposed += 1

    def shielded(self, key: BlockKey) -> None:
        """Let the block stay."""
        node = self._nodes[key]
        node.line.shield(node)
        self._num_exposed -= 1

    def removed(self, key: BlockKey) -> None:
        """Drop all that is known of the block."""
        self._drop(key)

    def _drop(self, key: BlockKey) -> Node:
        """Forget a block that is gone; its node still says which line it left."""
        node = self._nodes.pop(key)
        self._num_exposed -= node.exposed
        node.line.drop(node)
        return node
