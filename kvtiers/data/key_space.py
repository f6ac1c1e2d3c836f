"""From the engine's keys to the names under which one rank stores frames."""

from __future__ import annotations

from blake3 import blake3

from kvtiers.model.keys import BlockKey, Rank, StoreKey, store_key


class KeySpace:
    """Names frames by fingerprint, generation, rank and block.

    A generation is what a reset ends: names of an earlier one never come back.
    """

    def __init__(self, fingerprint: bytes, rank: Rank, generation: int = 0) -> None:
        self._fingerprint = fingerprint
        self._rank = rank
        self._enter(generation)

    @property
    def generation(self) -> int:
        """The present generation."""
        return self._generation

    def name(self, key: BlockKey) -> StoreKey:
        """Return what this rank stores a block under."""
        return store_key(self._prefix, self._rank, key)

    def enter(self, generation: int) -> None:
        """Begin a new generation."""
        self._enter(generation)

    def _enter(self, generation: int) -> None:
        self._generation = generation
        seed = self._fingerprint + generation.to_bytes(8, "big")
        self._prefix = blake3(seed).digest()
