"""An LMDB store whose file has holes, on a disk that others fill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from full_disks import fill, mounted
from lmdb_box import MIB, Box, settings_of

from kvtiers.data.lmdb_settings import Eviction, WriteMap
from kvtiers.model.outcome import Outcome

FAILED, OK = Outcome.FAILED, Outcome.OK


@pytest.fixture(params=["ext4", "tmpfs"])
def tiny_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with mounted(request.param, 24 * MIB, tmp_path) as folder:
        yield folder


@pytest.mark.parametrize("write_map", list(WriteMap))
def test_disk_that_others_fill_costs_writes_only(tiny_disk: Path, write_map: WriteMap) -> None:
    """What finds no room in a hole is FAILED; what is there stays."""
    settings = settings_of(tiny_disk / "s", 4 * MIB, eviction=Eviction.NONE, write_map=write_map)
    box = Box(settings)
    assert box.put(*range(20)) == [OK] * 20
    filler = fill(tiny_disk)
    outcomes = [what for n in range(100, 300, 20) for what in box.put(*range(n, n + 20))]
    assert set(outcomes) <= {OK, FAILED}
    assert (FAILED in outcomes) == (write_map is WriteMap.OFF)
    assert box.get(*range(20)) == [OK] * 20
    kept = [n for n, what in zip(range(100, 300), outcomes, strict=True) if what is OK]
    for start in range(0, len(kept), 20):
        part = kept[start : start + 20]
        assert box.get(*part) == [OK] * len(part)
    filler.unlink()
    assert box.put(*range(400, 410)) == [OK] * 10
    box.close()
    box = Box(settings)
    assert box.get(*range(20), *range(400, 410)) == [OK] * 30
    box.close()
