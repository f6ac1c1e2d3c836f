"""Which resident blocks follow which: the prefix chains of one tier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvtiers.model.keys import BlockKey


@dataclass(slots=True, eq=False)
class ChainNode:
    """A block that knows its place in a chain; siblings are a doubly linked list.

    It refers to the one before by its key: nodes are in no cycle of references.
    """

    key: BlockKey
    parent_key: BlockKey | None
    first_child: ChainNode | None = field(default=None, repr=False)
    next_sibling: ChainNode | None = field(default=None, repr=False)
    prev_sibling: BlockKey | None = field(default=None, repr=False)

    def children(self) -> Iterator[BlockKey]:
        """Iterate over the keys of the blocks that follow it."""
        child = self.first_child
        while child is not None:
            yield child.key
            child = child.next_sibling


class Chains:
    """Parent and child links between the nodes of one tier; every change is O(1) per link.

    A node whose parent is not here waits as an orphan, and is adopted when the parent comes.

    Args:
        nodes: those that are here, by key; kept by the owner, who enters a node before `add`, and
            takes it out before `remove`.
    """

    def __init__(self, nodes: Mapping[BlockKey, ChainNode]) -> None:
        self._nodes = nodes
        self._orphans: dict[BlockKey, ChainNode] = {}  # absent parent -> first orphan child

    def add(self, node: ChainNode) -> ChainNode | None:
        """Link a node; return its parent if this gave the parent its first child."""
        if self._orphans:
            node.first_child = self._orphans.pop(node.key, None)
        if node.parent_key is None:
            return None
        parent = self._nodes.get(node.parent_key)
        if parent is None:
            self._orphans[node.parent_key] = _prepend(node, self._orphans.get(node.parent_key))
            return None
        first = parent.first_child
        parent.first_child = node
        if first is None:
            return parent
        _prepend(node, first)
        return None

    def remove(self, node: ChainNode) -> ChainNode | None:
        """Unlink a node; return its parent if this took the parent's last child.

        Children of the node become orphans.
        """
        if node.first_child is not None:
            self._orphans[node.key] = node.first_child
            node.first_child = None
        parent = self._nodes.get(node.parent_key) if node.parent_key is not None else None
        if node.prev_sibling is not None:
            self._nodes[node.prev_sibling].next_sibling = node.next_sibling
        elif parent is not None:
            parent.first_child = node.next_sibling
        elif node.parent_key is not None:
            self._reroot_orphans(node.parent_key, node.next_sibling)
        if node.next_sibling is not None:
            node.next_sibling.prev_sibling = node.prev_sibling
        node.prev_sibling = node.next_sibling = None
        return parent if parent is not None and parent.first_child is None else None

    def _reroot_orphans(self, parent_key: BlockKey, first: ChainNode | None) -> None:
        if first is None:
            self._orphans.pop(parent_key, None)
        else:
            self._orphans[parent_key] = first


def _prepend(node: ChainNode, first: ChainNode | None) -> ChainNode:
    node.next_sibling = first
    if first is not None:
        first.prev_sibling = node.key
    return node
