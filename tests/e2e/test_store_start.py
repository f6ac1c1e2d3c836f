"""Places where a store cannot be are refused at start; a disk that fills up later is not fatal."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtiers.data import lmdb_folder
from kvtiers.observe.metrics import BLOCKS_FAILED

from .answers import differences, random_prompt
from .harness import EngineOptions, Engines, Refuses
from .tiers import SLOT_NBYTES, Tiers, dram, lmdb, nvme, tiered

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOMY = EngineOptions(num_gpu_blocks=512)
BLOCK = ROOMY.block_size

BAD_PLACES = {
    "nvme: a file": (
        "  - {kind: nvme, paths: [BASE/file], capacity: 16MiB}",
        r"kvtiers.yaml:3: tiers\[1\].*BASE/file.*(?:not a directory|is a file|Not a directory)",
    ),
    "nvme: above the free disk": (
        "  - {kind: nvme, paths: [BASE/nvme], capacity: 900TiB}",
        r"kvtiers.yaml:3: tiers\[1\].*its disk has \d+[KMGT]iB free; lower the tier's capacity",
    ),
    "nvme: less than a block": (
        "  - {kind: nvme, paths: [BASE/nvme], capacity: 64KiB}",
        r"kvtiers.yaml:3: tiers\[1\].*raise the tier's capacity to at least \d+MiB a rank",
    ),
    "lmdb: a file": (
        "  - {kind: lmdb, path: BASE/file, capacity: 16MiB}",
        r"kvtiers.yaml:3: tiers\[1\].*BASE/file is a file: .*needs a folder of its own",
    ),
    "lmdb: no parent": (
        "  - {kind: lmdb, path: BASE/absent/lmdb, capacity: 16MiB}",
        r"kvtiers.yaml:3: tiers\[1\].*BASE/absent/lmdb.*make its parent first",
    ),
    "lmdb: above the free disk": (
        "  - {kind: lmdb, path: BASE/lmdb, capacity: 900TiB}",
        r"kvtiers.yaml:3: tiers\[1\].*its disk has .* free: write a capacity of at most",
    ),
}


@pytest.mark.parametrize("what", BAD_PLACES)
def test_a_bad_place_is_refused_with_its_line_and_the_remedy(
    refuses: Refuses, tmp_path: Path, what: str
) -> None:
    (tmp_path / "file").write_text("")
    tier, message = (text.replace("BASE", str(tmp_path)) for text in BAD_PLACES[what])
    yaml = tmp_path / "kvtiers.yaml"
    yaml.write_text(f"tiers:\n  - {{kind: dram, capacity: 2MiB}}\n{tier}\n")
    refuses(EngineOptions(kvtiers=str(yaml)), message)
    assert not list(tmp_path.rglob("frames.slab"))
    assert not (tmp_path / "lmdb/data.mdb").exists()


@pytest.fixture
def small_disk(engines: Engines, tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 MiB; whoever has files on it is stopped before it goes."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("mounting needs root and mkfs.ext4")
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(48 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    mount = subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=False)
    if mount.returncode:
        pytest.skip("no loop mounts here")
    yield folder
    engines.shutdown()
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Fill a disk to its last block; returns the file that does."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for nbytes in (1 << 20, 4096):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(nbytes))
    return filler


@pytest.mark.parametrize("store", ["nvme", "lmdb, preallocated", "lmdb, growing"])
def test_a_disk_that_fills_up_costs_no_token(
    engines: Engines, small_disk: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    """Others take the room before the store has what it may."""
    if store == "lmdb, growing":  # as where a file cannot be given its blocks ahead
        monkeypatch.setattr(lmdb_folder, "preallocate", lambda folder, nbytes: False)
    name = store[:4]
    below = (
        nvme(small_disk / "nvme", capacity="16MiB")
        if name == "nvme"
        else lmdb(small_disk / "lmdb", capacity="16MiB")
    )
    reload = {"deadline": "10s", "prefetch": "off"}
    config = dram(f"{36 * SLOT_NBYTES // 1024}KiB", below, reload=reload)
    engine = engines.start(tiered(ROOMY, config))
    prompts = [random_prompt((30 + i) * BLOCK + 1, seed=600 + i) for i in range(4)]
    expected = {}

    def serve(when: str) -> Tiers:
        tiers = Tiers(engine)
        for i, prompt in enumerate(prompts):
            [answer] = engine.generate([prompt], 12)
            engine.settle()
            assert engine.reset_prefix_cache()
            first = expected.setdefault(i, answer)
            assert not differences({when: first}, {when: answer})
        tiers.assert_at_rest()
        return tiers

    filler = fill(small_disk)
    before = serve("first, on a full disk")
    full = serve("again, on a full disk")
    if store == "lmdb, growing":
        assert before.count(BLOCKS_FAILED, "full") + before.count(BLOCKS_FAILED, "failed") > 0
    else:  # what was preallocated is there
        assert full.reloaded_tokens(name) > 0
    filler.unlink()
    deadline = time.monotonic() + 60  # a store that was switched off is tried again by then
    room = serve("with room again")
    while not room.reloaded_tokens(name):
        assert time.monotonic() < deadline
        room = serve(f"once more, {deadline - time.monotonic():.1f} s before the deadline")
    if name == "nvme":  # the index caught up, so that a restart finds what was stored
        engine = engines.start(tiered(ROOMY, config))
        assert serve("after a restart").reloaded_tokens("nvme") > 0
