"""What outlives a process: the generation that frames are named with, and what others stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtiers.connector.shape import EngineShape
from kvtiers.connector.stores import lasting_folders, lmdb_settings
from kvtiers.control.controller import Controller
from kvtiers.data.generation_file import Generations
from kvtiers.data.index_reader import IndexReader
from kvtiers.data.inventory import Inventory
from kvtiers.data.key_space import KeySpace
from kvtiers.model.config import Config
from kvtiers.model.config_tiers import LmdbTier
from kvtiers.model.messages import Hello


class Lasting(Protocol):
    """What outlives a process, as far as the scheduler's side needs it."""

    @property
    def generation(self) -> int:
        """The number that frames are named with now."""
        ...

    def ask(self, controller: Controller) -> None:
        """Pass control's lookups on to the stores."""
        ...

    def tell(self, controller: Controller) -> None:
        """Tell control the answers that have come since the last call."""
        ...

    def renew(self) -> bool:
        """Begin a new generation; whether that was recorded for later starts."""
        ...

    def close(self) -> None:
        """Let go of the stores' indexes."""
        ...


class LastingStores:
    """The configured stores that outlive the process: their index readers and generations.

    Raises:
        StoreError: what is recorded beside a store cannot be read.
    """

    def __init__(self, config: Config, shape: EngineShape, hellos: Sequence[Hello]) -> None:
        self._generations = Generations(
            lasting_folders(config, shape.instance), hellos[0].fingerprint, shape.why_not_lasting
        )
        self._readers = _readers(config, hellos, self.generation)

    @property
    def generation(self) -> int:
        """See `Lasting`."""
        return self._generations.present

    def ask(self, controller: Controller) -> None:
        """See `Lasting`."""
        for lookup in controller.take_lookups():
            if lookup.store in self._readers:
                self._readers[lookup.store].ask(lookup)

    def tell(self, controller: Controller) -> None:
        """See `Lasting`."""
        for reader in self._readers.values():
            for answer in reader.answers():
                controller.answered(answer)

    def renew(self) -> bool:
        """See `Lasting`."""
        recorded = self._generations.renew()
        for reader in self._readers.values():
            reader.enter(self.generation)
        return recorded

    def close(self) -> None:
        """See `Lasting`."""
        for reader in self._readers.values():
            reader.close()


def _readers(config: Config, hellos: Sequence[Hello], generation: int) -> dict[str, IndexReader]:
    """Return an index reader for each store that others fill, or an earlier life has filled.

    Each store has its own, so that one that hangs holds up no other's answers.
    """
    readers: dict[str, IndexReader] = {}
    lookup_seconds = max(config.reload.deadline, config.reload.lookup_deadline)
    for tier in config.stores:
        name = tier.name
        inventories = [hello.stores[name].inventory for hello in hellos if name in hello.stores]
        inherited = len(inventories) == len(hellos) and all(inventories)
        if not inherited and not isinstance(tier, LmdbTier):
            continue
        readers[name] = IndexReader(
            {name: lmdb_settings(tier)} if isinstance(tier, LmdbTier) else {},
            [KeySpace(hello.fingerprint, hello.rank, generation) for hello in hellos],
            inventories={name: Inventory(inventories)} if inherited else {},
            lookup_seconds=lookup_seconds,
        )
    return readers
