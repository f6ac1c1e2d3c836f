"""Fixtures of the tests of stores."""

from collections.abc import Iterator

import pytest

from kvtiers.data.slab import Slab


@pytest.fixture
def store_slab() -> Iterator[Slab]:
    """A slab as the store suite has it."""
    slab = Slab(16, 12_288, pin="off")
    yield slab
    slab.close()
