"""bench/gpu_check.py has no errors of its own: all of it, small, on a pretended device.

Its numbers mean nothing here. What it says of right and wrong copies does.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]

if not importlib.util.find_spec("torch"):
    pytest.skip("no torch", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def _paths() -> Any:
    added = [str(REPOSITORY / "bench"), str(REPOSITORY / "tests" / "data")]
    sys.path[:0] = added
    yield
    for path in added:
        sys.path.remove(path)


class PretendedCuda:
    """What the checks use of ``torch.cuda``, over the host's memory and a pretended driver."""

    def __init__(self, fake: Any) -> None:
        self._fake = fake

    def synchronize(self) -> None:
        self._fake.lib.fake_run()
        self._fake.lib.fake_manual(0)

    def _sleep(self, cycles: int) -> None:
        """Keep copies waiting: they are behind this on the engine's stream."""
        self._fake.lib.fake_manual(1)

    def get_device_name(self) -> str:
        return "Pretended"

    def Stream(self) -> object:  # noqa: N802
        return object()

    def stream(self, stream: object) -> Any:
        return nullcontext()

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802
        assert enable_timing
        event = SimpleNamespace(at=0.0, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", time.perf_counter())
        event.elapsed_time = lambda end: (end.at - event.at) * 1e3
        return event


@pytest.fixture
def fake() -> Any:
    import fake_driver  # noqa: PLC0415

    if fake_driver.missing:
        pytest.skip(fake_driver.missing)
    return fake_driver.FakeDriver()


@pytest.fixture
def machine(fake: Any) -> Any:
    import fake_driver  # noqa: PLC0415
    from gpu_machine import KIB, MIB, Machine, Sizes  # noqa: PLC0415

    from kvtiers.cost.prefill import ModelShape  # noqa: PLC0415
    from kvtiers.data.cuda_device import CudaDevice  # noqa: PLC0415

    shape = ModelShape(
        2, 4, 16, 50_000, hidden_size=64, num_kv_heads=2, kv_elements_per_token=2 * 2 * 2 * 16
    )
    sizes = Sizes(
        pool_nbytes=16 * MIB,
        pieces=(4 * KIB, 16 * KIB, 2 * MIB),
        payload_nbytes=2 * MIB,
        batches=(1, 4),
        batch_nbytes=256 * KIB,
        peak_nbytes=MIB,
        repeats=1,
        seconds_each=0.02,
        square=32,
        num_products=2,
        num_thin=2,
        prompts=(32, 64, 128, 256),
        model=shape,
        feed_forward=96,
        pipeline_blocks=5,
        largest_layout=64 * MIB,
    )
    device = CudaDevice(fake.driver, 0, lambda: 0)
    return Machine(device, fake_driver.KERNELS, "cpu", PretendedCuda(fake), sizes)


@pytest.mark.slow
def test_all_sections_run_and_make_one_table(
    machine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu_check  # noqa: PLC0415

    out = tmp_path / "gpu.json"
    scratch = tmp_path / "disk"
    scratch.mkdir()
    gpu_check.main(["--out", str(out), "--scratch", str(scratch)], machine)
    report = json.loads(out.read_text())
    failed = {name: rows for name, rows in report["sections"].items() if isinstance(rows, str)}
    assert not failed
    names = set(gpu_check.sections_of(machine, scratch, sanitize=False))
    assert set(report["sections"]) == names
    for name in ("bytes", "order", "disk to device", "start-up"):
        assert [row["wrong"] for row in report["sections"][name] if row["wrong"]] == [], name
    printed = capsys.readouterr().out
    assert printed.count("|---") == 0
    assert printed.count("| what | measured | target | holds |") == 1
    table = out.with_suffix(".md").read_text()
    for line in ("| 2 MiB x 4 out, of peak", "| reload wins from, dram", "| reload wins from, nvme",
                 "| bytes of layouts, by all routes: wrong of"):  # fmt: skip
        assert line in table
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("what", [1, 2, 3])
def test_a_device_that_copies_wrongly_is_told_on(
    fake: Any, machine: Any, what: int, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu_check  # noqa: PLC0415

    fake.lib.fake_spoil(what)
    small = replace(machine, sizes=replace(machine.sizes, largest_layout=2**20))
    assert gpu_check.main(["--sanitize"], small) == 1
    assert "**NO**" in capsys.readouterr().out


def test_a_copy_that_does_not_wait_is_told_on(machine: Any) -> None:
    import gpu_check  # noqa: PLC0415

    machine.cuda._sleep = lambda cycles: None  # so that nothing holds the copies up
    assert all(row["wrong"] == ["it did not wait"] * 3 for row in gpu_check.check_order(machine))


def test_a_section_that_fails_does_not_take_the_others_along(
    machine: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu_check  # noqa: PLC0415
    from gpu_report import lines_of  # noqa: PLC0415

    def refuses() -> Any:
        raise RuntimeError("cuLaunchKernel: CUDA_ERROR_PRETENDED (719)")

    peak = {"peak": lambda: [{"out": 1.0, "back": 2.0, "both": 3.0}]}
    report = gpu_check.run(machine, {"bytes": refuses, **peak})
    assert gpu_check.write(report, None) == 1
    assert "failed: RuntimeError" in lines_of(report)[0].value
    assert len(lines_of(report)) == 4
    monkeypatch.setattr(gpu_check, "LAST_START_SECONDS", -1.0)
    report = gpu_check.run(machine, peak)
    assert "not run: 0 s" in capsys.readouterr().out or "not run" in report["sections"]["peak"]
    assert gpu_check.write(report, None) == 0


def test_what_is_interrupted_keeps_what_it_had(
    machine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu_check  # noqa: PLC0415

    out = tmp_path / "gpu.json"
    peak = {"out": 1.0, "back": 2.0, "both": 3.0}
    seen: list[object] = []

    def interrupted() -> Any:
        seen.append(json.loads(out.read_text())["sections"])  # already on disk
        raise KeyboardInterrupt

    sections = {"peak": lambda: [peak], "calls": interrupted, "torch": lambda: seen.append("ran")}
    report = gpu_check.run(machine, sections, out)
    assert seen == [{"peak": [peak]}]
    assert gpu_check.write(report, out) == 1
    assert report["sections"]["calls"] == "failed: interrupted"
    assert report["sections"]["torch"] == "not run: interrupted"
    assert "peak out, GB/s: one pinned copy | 1.0" in capsys.readouterr().out


def test_a_section_that_takes_too_long_ends_with_its_next_row(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu_check  # noqa: PLC0415

    monkeypatch.setattr(gpu_check, "LAST_ROW_SECONDS", 0.0)
    rows = ({"call": f"call {i}", "us": 1.0} for i in range(1000))
    report = gpu_check.run(machine, {"calls": lambda: rows})
    assert report["sections"]["calls"] == [{"call": "call 0", "us": 1.0}]


def test_the_tools_share_five_minutes(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess  # noqa: PLC0415

    import gpu_check  # noqa: PLC0415

    given: list[float] = []

    def hangs(command: list[str], *, timeout: float, **options: object) -> Any:
        given.append(timeout)
        now[0] += timeout
        raise subprocess.TimeoutExpired(command, timeout)

    now = [0.0]
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: f"/somewhere/{name}")
    monkeypatch.setattr(gpu_check.subprocess, "run", hangs)
    monkeypatch.setattr(gpu_check.time, "perf_counter", lambda: now[0])
    rows = list(gpu_check.run_tools())
    assert [row["clean"] for row in rows] == [False] * 4
    assert given == pytest.approx([70.0] * 4)


@pytest.mark.parametrize("option", ["--scratch", "--out"])
def test_a_path_that_cannot_be_used_is_told_before_minutes_are_spent(
    option: str, machine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu_check  # noqa: PLC0415

    for path in (tmp_path / "nowhere" / "x", tmp_path if option == "--out" else Path(__file__)):
        assert gpu_check.main([option, str(path)], machine) == 2
        assert capsys.readouterr().out.startswith(f"{option} {path}: no f")


def test_a_disk_without_room_fails_its_own_section_alone(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu_check  # noqa: PLC0415

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    sections = gpu_check.sections_of(machine, tmp_path, sanitize=False)
    chosen = {name: sections[name] for name in ("disk to device", "prefill")}
    report = gpu_check.run(machine, chosen)
    assert "No space left" in report["sections"]["disk to device"]
    assert report["sections"]["disk to device"].startswith("failed: ")
    assert len(report["sections"]["prefill"]) == len(machine.sizes.prompts)  # no crossover: no disk


def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    import gpu_check  # noqa: PLC0415
    import torch  # noqa: PLC0415

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    assert gpu_check.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().out


def test_tools_that_are_not_installed_are_no_failure(
    machine: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu_check  # noqa: PLC0415

    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: None)
    assert gpu_check.main(["--sanitizers"], machine) == 0
    assert "compute-sanitizer is not installed" in capsys.readouterr().out
