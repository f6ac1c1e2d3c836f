"""A probe measures every link through the real stores, and leaves nothing behind."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvtiers.bench.others import Others
from kvtiers.bench.probe import num_shapes, run_probe
from kvtiers.bench.probe_copies import HBM_LINKS, TorchSide, measure_copies
from kvtiers.bench.probe_even import EvenPlan, break_even
from kvtiers.bench.probe_pace import Pace
from kvtiers.bench.probe_plan import DEPTHS, KIB, MIB, SIZES, ProbePlan, Shape
from kvtiers.bench.probe_tiers import TierProbe, measure_tier
from kvtiers.bench.scratch import PREFIX, scratch_beside
from kvtiers.model.config import parse_mapping
from kvtiers.model.errors import ConfigError, StoreError
from kvtiers.model.outcome import Outcome


def config(*stores):
    return parse_mapping({"tiers": [{"kind": "dram", "capacity": "1MiB"}, *stores]})


def all_tiers(folder: Path):
    return config(
        {"kind": "memory", "capacity": "1MiB"},
        {"kind": "nvme", "paths": [f"{folder}/a/kv", f"{folder}/b/kv"], "capacity": "1MiB"},
        {"kind": "lmdb", "path": f"{folder}/shared.lmdb", "capacity": "1MiB"},
    )


def plan(found, **changes):
    small = {"sizes": (64 * KIB, 128 * KIB), "depths": (1, 4, 16), "num_layers": 4}
    bounds = {"scratch_nbytes": 16 * MIB, "max_repeats": 2, "cache_nbytes": 8 * MIB}
    bounds["seconds"] = 600.0  # two repeats take one; a busy machine shall miss no shape
    return ProbePlan(found, **{**small, **bounds, "device": "cpu", **changes})


@pytest.fixture
def folder(tmp_path):
    """Two disks' folders, of which the store's own do not exist yet."""
    for name in "ab":
        (tmp_path / name).mkdir()
    return tmp_path


def test_every_link_is_measured_and_fitted_and_nothing_is_left(folder):
    seen = []
    the_plan = plan(all_tiers(folder))
    result = run_probe(the_plan, lambda name, shape: seen.append((name, shape)))
    found = result.calibration
    names = ["hbm>dram", "dram>hbm"]
    names += [link for t in ("memory", "nvme", "lmdb") for link in (f"dram>{t}", f"{t}>dram")]
    assert list(found.fits) == names
    assert len(seen) == num_shapes(the_plan) == 4 * 6
    shapes = {(c.link, c.num_blocks, c.nbytes // c.num_blocks // (64 * KIB)) for c in found.cells}
    assert shapes == set(itertools.product(names, (1, 4, 16), (1, 2)))
    assert found.tiers["nvme"].filesystem
    assert not result.missing
    assert sorted(path.name for path in folder.rglob("*")) == ["a", "b"]


def test_scratch_takes_no_more_than_it_may(folder):
    most = {}

    def on_shape(name, _shape):
        files = [file for file in folder.rglob("*") if file.is_file()]
        used = sum(file.stat().st_blocks * 512 for file in files)
        most[name] = max(used, most.get(name, 0))

    the_plan = plan(all_tiers(folder))
    run_probe(the_plan, on_shape)
    assert most["dram>hbm"] == most["memory"] == 0
    for tier in ("nvme", "lmdb"):
        assert 0 < most[tier] <= the_plan.scratch_nbytes


def test_the_store_itself_is_not_touched(folder):
    mine = folder / "a/kv/0/frames"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    before = mine.parent.stat().st_mtime_ns
    run_probe(plan(all_tiers(folder)), lambda *_: None)
    assert mine.read_bytes() == b"mine"
    assert mine.parent.stat().st_mtime_ns == before
    assert [path.name for path in (folder / "a").iterdir()] == ["kv"]


def test_an_interrupted_probe_leaves_nothing(folder):
    def stop(name: str, _shape: Shape) -> None:
        if name == "lmdb":
            assert list(folder.glob(f"{PREFIX}*"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_probe(plan(all_tiers(folder)), stop)
    assert not list(folder.rglob(f"{PREFIX}*"))


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_a_probe_that_is_ended_from_outside(folder, ending):
    """SIGTERM cleans up; what SIGKILL leaves is removed by the next one."""
    yaml = folder / "c.yaml"
    yaml.write_text(
        "tiers: [{kind: dram, capacity: 1MiB}, "
        f"{{kind: lmdb, path: {folder}/a/kv, capacity: 1MiB}}]"
    )
    options = ("--device", "cpu", "--seconds", "60", "--scratch", "64MiB")
    command = [sys.executable, "-m", "kvtiers", "probe", str(yaml), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not list((folder / "a").glob(f"{PREFIX}*/lmdb/*")):
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        process.send_signal(ending)
        process.communicate(timeout=60)
    assert process.returncode
    assert bool(list((folder / "a").iterdir())) is (ending == signal.SIGKILL)
    with scratch_beside(folder / "a/kv", inside_mount=False) as scratch:
        assert list((folder / "a").iterdir()) == [scratch]
        with scratch_beside(folder / "a/other", inside_mount=False) as second:
            assert scratch.is_dir()  # of a probe that runs: not swept
            assert second != scratch
    assert not list((folder / "a").iterdir())


def test_a_tier_without_a_place_is_named_and_the_others_are_measured(folder):
    (folder / "file").write_text("")
    tiers = config(
        {"kind": "nvme", "paths": [f"{folder}/a/kv"], "capacity": "1MiB"},
        {"kind": "lmdb", "path": "/proc/none/lmdb", "capacity": "1MiB"},
    )
    result = run_probe(plan(tiers), lambda *_: None)
    assert list(result.calibration.tiers) == ["nvme"]
    (missing,) = result.missing
    assert missing.startswith("lmdb: ")
    assert "/proc" in missing


def test_a_disk_without_room_is_not_measured(folder):
    tiers = config({"kind": "nvme", "paths": [f"{folder}/a/kv"], "capacity": "1MiB"})
    result = run_probe(plan(tiers, scratch_nbytes=2**60), lambda *_: None)
    assert "has" in result.missing[0]
    assert "free" in result.missing[0]
    assert "nvme>dram" not in result.calibration.fits


def test_a_mount_point_is_measured_inside_or_not_at_all():
    mount = Path("/dev/shm")
    if not os.path.ismount(mount) or not os.access(mount, os.W_OK):
        pytest.skip("no mount point to write to")
    with scratch_beside(mount, inside_mount=True) as folder:
        assert folder.parent == mount
    with pytest.raises(StoreError, match="mount point"), scratch_beside(mount, inside_mount=False):
        pass


def test_bytes_that_come_back_as_others_are_an_error(folder, monkeypatch):
    tiers = config({"kind": "memory", "capacity": "1MiB"})
    the_plan = plan(tiers)
    probe = TierProbe(tiers.stores[0], (), the_plan)
    monkeypatch.setattr(
        "kvtiers.data.memory_store.MemoryStore._get",
        lambda self, frame: Outcome.OK,
    )
    with pytest.raises(StoreError, match="read back as other bytes"):
        list(measure_tier(probe, the_plan, Pace(1.0, 6, 3), lambda *_: None))


def test_torch_copies_are_measured_as_those_of_an_engine():
    pytest.importorskip("torch")
    the_plan = plan(config(), sizes=(64 * KIB,))
    cells = list(
        measure_copies(TorchSide(the_plan, "cpu"), the_plan, Pace(1.0, 3, 3), lambda *_: None)
    )
    assert {cell.link for cell in cells} == set(HBM_LINKS.values())
    assert {cell.num_blocks for cell in cells} == {1, 4, 16}


def test_a_gpu_that_is_not_there_is_said(monkeypatch):
    monkeypatch.setattr("kvtiers.bench.probe._why_no_gpu", lambda: "torch sees no CUDA device")
    with pytest.raises(ConfigError, match="torch sees no CUDA device; give --device cpu"):
        run_probe(plan(config(), device="cuda"), lambda *_: None)
    result = run_probe(plan(config(), device="auto"), lambda *_: None)
    assert "No GPU was measured" in result.notes[0]
    assert result.calibration.device == "cpu"


def test_others_that_use_the_machine_are_told_from_the_probe(tmp_path):
    ticks = os.sysconf("SC_CLK_TCK")

    def stat(busy_seconds: float, idle_seconds: float) -> None:
        busy, idle = int(busy_seconds * ticks), int(idle_seconds * ticks)
        (tmp_path / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1\n")

    stat(0, 0)
    others = Others(tmp_path)
    stat(50, 50)
    assert others.share() == pytest.approx(0.5, abs=0.05)
    stat(0, 100)
    assert others.share() == 0
    (tmp_path / "stat").unlink()
    assert others.share() is None


def test_a_disturbed_probe_says_so(monkeypatch):
    for share, said in ((0.3, True), (0.01, False), (None, False)):
        monkeypatch.setattr(Others, "share", lambda self, found=share: found)
        notes = run_probe(plan(config()), lambda *_: None).notes
        assert any("Disturbed: other programs used 30%" in note for note in notes) is said


def test_scratch_bounds_the_depths():
    for nbytes in (16 * MIB, 640 * MIB):
        the_plan = plan(config(), scratch_nbytes=nbytes, sizes=SIZES, depths=DEPTHS)
        for size in the_plan.sizes:
            slot = the_plan.format_of(size).slot_nbytes
            assert max(the_plan.depths_of(size)) * slot * 4 <= nbytes
    assert max(the_plan.depths_of(max(SIZES))) == 64
    with pytest.raises(ConfigError, match="scratch hold too few blocks; give 16MiB or more"):
        plan(config(), scratch_nbytes=15 * MIB)
    with pytest.raises(ConfigError, match="no 4096 layers"):
        plan(config(), num_layers=4096)


def test_time_is_shared_and_bounded():
    now = [0.0]

    def shape(pace, seconds):
        num = 0
        for _ in pace.repeats():
            now[0] += seconds
            num += 1
        return num

    pace = Pace(10.0, 4, 9, clock=lambda: now[0])
    assert shape(pace, 0.01) == 9
    assert shape(pace, 1.0) == 4  # a third of what is left
    assert shape(pace, 20.0) == 2
    assert not pace.exhausted or now[0] > 30
    assert shape(pace, 1.0) == 1
    assert pace.exhausted


def test_break_even_lengths_follow_the_links(folder):
    result = run_probe(plan(config({"kind": "memory", "capacity": "1MiB"})), lambda *_: None)
    found = result.calibration
    assert break_even(EvenPlan(), found) is None  # no GPU was measured, none was named
    slow = found.fits["memory>dram"].model_copy(update={"bandwidth_bytes_per_second": 1e8})
    disk = found.model_copy(update={"fits": {**found.fits, "memory>dram": slow}})
    even = break_even(EvenPlan(hardware="h100"), disk)
    assert even is not None
    assert even.block_nbytes == 2 * MIB
    assert even.tokens["memory"] is None  # 0.1 GB/s against an H100
    assert even.tokens["dram"] is not None
    by_flops = break_even(EvenPlan(flops_per_second=1e11), disk)
    assert by_flops is not None
    assert by_flops.tokens["memory"] is not None
    assert by_flops.tokens["memory"] <= 128


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hardware": "h1000"}, "did you mean 'h100'"),
        ({"hardware": "h100", "flops_per_second": 1e12}, "exclude each other"),
        ({"flops_per_second": -1.0}, "operations a second"),
        ({"kv_dtype": "int3"}, "known: fp32"),
    ],
)
def test_wrong_engines_are_refused_before_anything_is_measured(wrong, message):
    with pytest.raises(ConfigError, match=message):
        EvenPlan(**wrong)


def test_blocks_of_a_layout_fill_their_frame():
    the_plan = plan(config(), num_layers=61, sizes=(128 * KIB,))
    layout = the_plan.layout_of(128 * KIB, 8)
    (group,) = layout.groups
    assert group.payload_nbytes == the_plan.format_of(128 * KIB).payload_nbytes
    assert np.sum(layout.allocations) == 8 * group.payload_nbytes
