"""The part of a copier that is the same wherever a copy is done when ``submit`` returns."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvtiers.data.copier import CopyBatch, Direction, Marker, Ticket
from kvtiers.model.errors import ProtocolError


class ImmediateCopier(ABC):
    """A `Copier` for engines on the CPU.

    Such an engine's operators are done when they return, so that all work before any point
    of the program is complete there: a copy that runs inside ``submit`` comes after it. The
    caller submits from the thread, and at the moment, where the order says.
    """

    def __init__(self) -> None:
        self._submitted = 0
        self._pending: set[Ticket] = set()
        self._closed = False

    def mark(self) -> Marker:
        """Return the only marker there is: nothing is ever queued."""
        return Marker(0)

    def submit(
        self,
        direction: Direction,
        batch: CopyBatch,
        after: Marker | None,  # noqa: ARG002  already reached, see the class
    ) -> Ticket:
        """Copy a batch now; see `Copier.submit`."""
        if self._closed:
            raise ProtocolError("the copier is closed")
        self._copy(direction, batch)
        self._submitted += 1
        ticket = Ticket(self._submitted)
        self._pending.add(ticket)
        return ticket

    def done(self, ticket: Ticket) -> bool:
        """Return True and forget the ticket.

        Raises:
            ProtocolError: the ticket was never issued, or is asked again.
        """
        if ticket not in self._pending:
            raise ProtocolError(f"ticket {ticket} is not pending")
        self._pending.remove(ticket)
        return True

    def seconds(self, ticket: Ticket) -> float | None:  # noqa: ARG002
        """Return None: nothing waits, see `Copier.seconds`."""
        return None

    def hold_engine(self, ticket: Ticket) -> bool:
        """Return True: it has been copied.

        Raises:
            ProtocolError: the ticket was never issued.
        """
        self.wait(ticket)
        return True

    def wait(self, ticket: Ticket) -> None:
        """Return at once.

        Raises:
            ProtocolError: the ticket was never issued.
        """
        if not 0 < ticket <= self._submitted:
            raise ProtocolError(f"ticket {ticket} was never issued")

    def close(self) -> None:
        """Refuse further copies; idempotent."""
        self._closed = True

    @abstractmethod
    def _copy(self, direction: Direction, batch: CopyBatch) -> None:
        """Check the whole batch, then copy it; raise `TransferError` before any byte moves."""
