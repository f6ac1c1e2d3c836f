"""Everything that changes the meaning of a frame's bytes, as one digest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from blake3 import blake3

Scalar = None | bool | int | float | str


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Named facts and their digest.

    Attributes:
        facts: name to value, in any order; the digest does not depend on it.
        digest: BLAKE3-256 of the canonical JSON of the facts, 32 bytes.
    """

    facts: Mapping[str, Scalar]
    digest: bytes

    @classmethod
    def of(cls, facts: Mapping[str, Scalar]) -> Fingerprint:
        """Make the fingerprint of some facts.

        Raises:
            TypeError: a value is no JSON scalar; nested values would have no canonical form.
        """
        for name, value in facts.items():
            if not isinstance(value, bool | int | float | str | None):
                raise TypeError(f"fact {name!r} has type {type(value).__name__}, not a scalar")
        canonical = json.dumps(dict(facts), sort_keys=True, separators=(",", ":"))
        return cls(dict(facts), blake3(canonical.encode()).digest())
