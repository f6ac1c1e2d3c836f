"""What the replacement rules are made of: lines of blocks, of which some may not leave."""

from __future__ import annotations

import heapq
import zlib
from collections import deque
from typing import Final, cast

from kvtiers.model.keys import BlockKey

_GONE: Final = -1
_NO_KEY: Final = BlockKey(b"")
_SLACK: Final = 64  # stale rows that are not worth a sweep
_LATELY: Final = 256  # exposed of late, of which most are shielded soon
_AT_ONCE: Final = 4  # rows that one call sweeps
_Row = tuple[int, "Node"]

# 32 bits of a key. What is gone is remembered by it: nothing refers to the key of a block that
# left. With a million remembered, one in 4,000 new keys is taken for an old one.
fingerprint = zlib.crc32


class Node:
    """One resident block as a rule sees it.

    Attributes:
        order: its place in its line; it only ever grows. exposed: whether it may leave.
        uses: hits that the rule counts, by its own bounds.
        row: of its line's that is its own; `_NEW` if it is about to get one, else None.
    """

    __slots__ = ("exposed", "key", "line", "order", "row", "uses")

    def __init__(self, key: BlockKey, line: Line, order: int = 0) -> None:
        self.key = key
        self.line = line
        self.order = order
        self.exposed = False
        self.row: _Row | None = None
        self.uses = 0
        line.size += 1

    def __lt__(self, other: Node) -> bool:
        """Rank none of two that share a place before the other."""
        return False


_NEW: Final[_Row] = (_GONE, cast(Node, None))


class Line:
    """Blocks in order, of which the first that may leave is wanted.

    A heap of (order, node) of those that are or were exposed. A row's order may lag behind its
    node's, which only grows, and is put right when the row surfaces. Rows of others surface too,
    and are swept when they outnumber the exposed, a few by each call: O(log n) a change, and a hit
    costs nothing. Rows are made when somebody asks, or after a while: most blocks of a chain that
    grows are exposed for a step.

    Attributes:
        size: blocks in it, exposed or not.
    """

    __slots__ = ("_heap", "_new", "_unswept", "num_exposed", "size")

    def __init__(self) -> None:
        self.size = 0
        self.num_exposed = 0
        self._heap: list[_Row] = []
        self._unswept: list[_Row] = []  # a heap too
        self._new: deque[Node] = deque()  # that have no row yet

    def expose(self, node: Node) -> None:
        """Let a block of this line leave from now on."""
        node.exposed = True
        self.num_exposed += 1
        if node.row is None:
            node.row = _NEW
            self._new.append(node)
            if len(self._new) > _LATELY:
                self._take_new(2)

    def shield(self, node: Node) -> None:
        """Let a block stay."""
        node.exposed = False
        self.num_exposed -= 1
        if self._unswept:
            self._sweep()
        elif len(self._heap) > 2 * self.num_exposed + _SLACK:
            self._unswept, self._heap = self._heap, []

    def join(self, node: Node, order: int) -> None:
        """Take a block of another line, at a new place."""
        old = node.line
        old.size -= 1
        self.size += 1
        node.line, node.order = self, order
        node.row = None
        if node.exposed:
            old.shield(node)
            self.expose(node)

    def drop(self, node: Node) -> None:
        """Forget a block that is gone; its line stays on record."""
        self.size -= 1
        node.row = None
        if node.exposed:
            self.shield(node)
        node.order, node.key = _GONE, _NO_KEY

    def first(self) -> Node | None:
        """Return the first block that may leave."""
        if self._new:
            self._take_new(len(self._new))
        heap = self._heap
        if heap and not self._unswept:  # `_top`, without a call: asked for every block that leaves
            row = heap[0]
            order, node = row
            if node.row is row and node.exposed and node.order == order:
                return node
        first = _top(heap)
        if self._unswept:
            other = _top(self._unswept)
            if first is None or (other is not None and other.order < first.order):
                return other
        return first

    def _take_new(self, num: int) -> None:
        """Make rows for the oldest of those without; for what may not leave there is no need."""
        new, heap = self._new, self._heap
        for _ in range(num):
            node = new.popleft()
            if node.line is self and node.row is _NEW:
                node.row = None
                if node.exposed:
                    row = node.row = (node.order, node)
                    heapq.heappush(heap, row)

    def _sweep(self) -> None:
        """Keep some of the rows whose blocks may leave."""
        unswept = self._unswept
        for _ in range(min(_AT_ONCE, len(unswept))):
            row = unswept.pop()  # which leaves a heap
            node = row[1]
            if node.row is row:
                node.row = None
                if node.exposed:
                    row = node.row = (node.order, node)
                    heapq.heappush(self._heap, row)


def _top(heap: list[_Row]) -> Node | None:
    """Return the first of a heap that may leave."""
    while heap:
        row = heap[0]
        order, node = row
        if node.row is not row:
            heapq.heappop(heap)
        elif not node.exposed:
            heapq.heappop(heap)
            node.row = None
        elif node.order != order:
            row = node.row = (node.order, node)
            heapq.heapreplace(heap, row)
        else:
            return node
    return None


class Fifo(Line):
    """Blocks in order, each of which has its turn, whether it may leave or not.

    Whose turn is taken is meant for another line. O(1) a change; nobody asks it who may leave.
    """

    __slots__ = ("_swept", "_turns")

    def __init__(self) -> None:
        super().__init__()
        self._swept: deque[_Row] = deque()  # those before `_turns`
        self._turns: deque[_Row] = deque()

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
        self._turns.append((order, node))
        if len(self._turns) + len(self._swept) > 2 * self.size + _SLACK:
            self._sweep_turns()

    def next_turn(self) -> Node | None:
        """Take the turn of the first block; it is of this line until another takes it."""
        for turns in (self._swept, self._turns):
            while turns:
                turn = turns.popleft()
                if self._waits(turn):
                    return turn[1]
        return None

    def _sweep_turns(self) -> None:
        """Forget the first turns that were given up; some, so that no call takes long."""
        for _ in range(_AT_ONCE):
            if not self._turns:
                self._turns, self._swept = self._swept, self._turns
            turn = self._turns.popleft()
            if self._waits(turn):
                self._swept.append(turn)

    def _waits(self, turn: _Row) -> bool:
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

    def shrink(self, num: int) -> bool:
        """Forget so many blocks, whichever; False if there are none left."""
        for _ in range(min(num, len(self._nodes))):
            _, node = self._nodes.popitem()
            self._num_exposed -= node.exposed
            node.line.drop(node)
        return bool(self._nodes)

    def _drop(self, key: BlockKey) -> Node:
        """Forget a block that is gone; its node still says which line it left."""
        node = self._nodes.pop(key)
        self._num_exposed -= node.exposed
        node.line.drop(node)
        return node
