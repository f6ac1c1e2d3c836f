"""The exceptions that kvtiers raises: misuse and bad configuration, never a failed block."""

from __future__ import annotations


class KVTiersError(Exception):
    """Base of every exception that kvtiers raises on purpose."""


class ConfigError(KVTiersError):
    """The YAML file, or a value in it, is wrong; the message says where and what would be right."""


class LayoutError(KVTiersError):
    """The engine's KV tensors cannot be described, or do not match their description."""


class TransferError(KVTiersError):
    """A transfer order is malformed: a block id, slot or size out of range. No byte has moved."""


class ProtocolError(KVTiersError):
    """A caller broke a contract, such as a second ``commit`` of one reservation."""


class PlacedError(KVTiersError):
    """A value in the configuration turns out to be impossible on this machine.

    Attributes:
        path: the configuration's key that is to blame, such as ``("tiers", 0, "capacity")``;
            empty where none is.
    """

    def __init__(self, message: str, path: tuple[str | int, ...] = ()) -> None:
        super().__init__(message)
        self.path = path


class CapacityError(PlacedError):
    """A tier cannot hold even one frame, or the machine cannot provide the space asked for."""


class UnsupportedEngineError(KVTiersError):
    """The engine, or the way it is configured, is one that kvtiers cannot serve correctly."""


class StoreError(PlacedError):
    """A store cannot use its folder or file; the message names the path and the remedy."""
