"""The interface between slab slots and the engine's KV tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

from kvtiers.model.messages import Int64s

Marker = NewType("Marker", int)
"""A point in the engine's own queue of work; a copy ordered after it sees all that came before."""

Ticket = NewType("Ticket", int)
"""A submitted batch."""


class Direction(Enum):
    """Which way a batch goes."""

    GATHER = "gather"  # engine blocks -> slots
    SCATTER = "scatter"  # slots -> engine blocks


@dataclass(frozen=True, slots=True)
class CopyBatch:
    """Blocks of one KV group to copy; row i pairs ``block_ids[i]`` with ``slots[i]``.

    Attributes:
        group: index of the KV group; it fixes which runs a block has.
        block_ids: engine block ids, int64 [n]. slots: slab slots, int64 [n].
    """

    group: int
    block_ids: Int64s
    slots: Int64s


class Copier(Protocol):
    """Moves payloads between engine blocks and slots.

    A payload lies behind the frame header of its slot, at `FrameFormat.header_nbytes`.
    Every id of a batch is range-checked before its first byte moves.
    """

    def mark(self) -> Marker:
        """Capture the present end of the engine's queue; called on the engine's thread."""
        ...

    def submit(self, direction: Direction, batch: CopyBatch, after: Marker | None) -> Ticket:
        """Queue a copy that runs once all work before `after` is done.

        Raises:
            TransferError: a block id or slot is out of range, with its row; nothing was copied.
        """
        ...

    def done(self, ticket: Ticket) -> bool:
        """Whether the batch has been copied; each ticket is asked until it is true, once.

        Raises:
            OSError, RuntimeError: the copy is over and has failed, which consumes the ticket;
                what it left in the targets is undefined.
        """
        ...

    def seconds(self, ticket: Ticket) -> float | None:
        """Return what the batch took once its marker was reached; asked when `done` became true.

        None where nothing waits for a marker: the caller's clock knows.
        """
        ...

    def hold_engine(self, ticket: Ticket) -> bool:
        """Let the engine's device wait for a batch; called on the engine's thread, from any state.

        What the engine queues on its current stream from now on runs after the batch, however
        that ends: whether it has failed, `done` says. The host does not wait.

        Returns:
            False where that is not to be had now; the caller must wait for `done` then.

        Raises:
            OSError, RuntimeError: the device refused, and the engine does not wait.
        """
        ...

    def wait(self, ticket: Ticket) -> None:
        """Block until the batch has been copied; does not consume the ticket."""
        ...

    def close(self) -> None:
        """Release what the copier holds; idempotent. Runs no further copies."""
        ...
