"""What keeps an LMDB environment from being used."""

from __future__ import annotations

from kvtiers.model.errors import KVTiersError


class UnavailableError(KVTiersError):
    """The environment cannot be used now; whoever asked treats it as empty."""


class BusyError(UnavailableError):
    """No transaction is to be had now, though nothing is wrong with the file."""


class DamagedError(UnavailableError):
    """The file is not what its users left; it must not be opened."""
