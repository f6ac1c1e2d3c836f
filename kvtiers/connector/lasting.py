"""What outlives a process: which generation its frames are of, and what others have stored."""

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
    """What outlives a process, as far as the scheduler's side needs it; see `LastingStores`."""

    @property
    def generation(self) -> int: ...  # noqa: D102

    def ask(self, controller: Controller) -> None: ...  # noqa: D102
    def tell(self, controller: Controller) -> None: ...  # noqa: D102
    def renew(self) -> bool: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


class LastingStores:
    """Beside control: carries its questions to the index reader, and names the generation.

    Raises:
        StoreError: what is recorded beside a store cannot be read.
    """

    def __init__(self, config: Config, shape: EngineShape, hellos: Sequence[Hello]) -> None:
        self._generations = Generations(
            lasting_folders(config, shape.instance), hellos[0].fingerprint, shape.why_not_lasting
        )
        inventories = {
            name: Inventory([hello.stores[name].inventory for hello in hellos])
            for name in hellos[0].stores
            if all(hello.stores[name].inventory for hello in hellos)
        }
        shared = {
            tier.name: lmdb_settings(tier) for tier in config.stores if isinstance(tier, LmdbTier)
        }
        self._reader: IndexReader | None = None
        if shared or inventories:
            self._reader = IndexReader(
                shared,
                [KeySpace(hello.fingerprint, hello.rank, self.generation) for hello in hellos],
                inventories=inventories,
                lookup_seconds=config.reload.lookup_deadline,
            )

    @property
    def generation(self) -> int:
        """What the names of frames are made with now."""
        return self._generations.present

    def ask(self, controller: Controller) -> None:
        """Hand on what control wants to know."""
        for lookup in controller.take_lookups():
            if self._reader is not None:
                self._reader.ask(lookup)

    def tell(self, controller: Controller) -> None:
        """Tell control what has been found out since the last call."""
        if self._reader is not None:
            for answer in self._reader.answers():
                controller.answered(answer)

    def renew(self) -> bool:
        """Begin a new generation; whether a later start will know of it."""
        recorded = self._generations.renew()
        if self._reader is not None:
            self._reader.enter(self.generation)
        return recorded

    def close(self) -> None:
        """Let go of the stores' indexes."""
        if self._reader is not None:
            self._reader.close()
