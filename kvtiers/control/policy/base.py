"""The interface of replacement rules."""

from __future__ import annotations

from typing import Protocol

from kvtiers.model.keys import BlockKey


class EvictionPolicy(Protocol):
    """Orders the blocks of one tier by who should leave first.

    The tier says which blocks exist and which of them *may* leave: a block is exposed
    while it is READY, unpinned and the tail of its chain. A policy never names a block
    that is not exposed, and never evicts: it only ranks.
    """

    def admitted(self, key: BlockKey, parent: BlockKey | None = None) -> None:
        """Note that a block became resident; it is not exposed yet.

        Args:
            parent: the block before it in its chain, here or not, if there is one.
        """
        ...

    def touched(self, key: BlockKey) -> None:
        """Note that a resident block was hit."""
        ...

    def exposed(self, key: BlockKey) -> None:
        """Note that a resident block may leave from now on."""
        ...

    def shielded(self, key: BlockKey) -> None:
        """Note that an exposed block may no longer leave."""
        ...

    def removed(self, key: BlockKey) -> None:
        """Note that a block is gone, exposed or not."""
        ...

    def next_victim(self) -> BlockKey | None:
        """Return the exposed block that should leave first, None when none is exposed.

        Asking twice gives the same answer.
        """
        ...
