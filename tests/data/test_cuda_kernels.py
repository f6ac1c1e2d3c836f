"""The CUDA kernels compile for every device, without spills; NVRTC takes the same source."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvtiers import native
from kvtiers.data.copier_cuda import CudaTuning
from kvtiers.data.copier_cupy import compile_kernels

SOURCES = Path(__file__).parents[2] / "csrc" / "cuda"
TARGETS = (80, 90, 100, 120)
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
needs_cmake = pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")


def project(folder: Path) -> list[str]:
    """Write a project of the kernels alone; returns how to configure it."""
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.15...3.30)\nproject(alone LANGUAGES NONE)\n"
        f'add_subdirectory("{SOURCES}" cuda)\n'
    )
    return ["cmake", "-S", str(folder), "-B", str(folder / "build")]


@pytest.mark.slow
@needs_nvcc
@needs_cmake
def test_the_build_log_has_every_kernel_for_every_device_without_spills(tmp_path: Path) -> None:
    """What a build of the package says of itself, by its own flags."""
    build = ["cmake", "--build", str(tmp_path / "build"), "--verbose"]
    for command in ([*project(tmp_path), "-DKVTIERS_CUDA=ON"], build):
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    log = ran.stdout + ran.stderr
    compiled = re.findall(r"Compiling entry function '(\w+)' for '(\w+)'", log)
    names = ("kvtiers_gather", "kvtiers_scatter")
    assert sorted(compiled) == sorted((name, f"sm_{t}") for name in names for t in TARGETS)
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes", log)
    assert spills == [("0", "0", "0")] * len(compiled)
    registers = [int(num) for num in re.findall(r"Used (\d+) registers", log)]
    assert len(registers) == len(compiled)
    assert max(registers) * 512 <= 65536  # a thread block must fit an SM
    assert "arch=compute_80,code=compute_80" in log  # PTX, for devices that are yet to come
    (fatbin,) = (tmp_path / "build").rglob("kernels.fatbin")
    assert fatbin.stat().st_size > 10_000


@pytest.mark.slow
@needs_cmake
@pytest.mark.parametrize("mode", ["AUTO", "ON", "OFF"])
def test_without_nvcc_only_a_build_that_insists_fails(mode: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [*project(tmp_path), f"-DKVTIERS_CUDA={mode}", "-DKVTIERS_NVCC=false"],
        capture_output=True,
        text=True,
        check=False,
    )
    said = ran.stdout + ran.stderr
    assert (ran.returncode == 0) == (mode != "ON"), said
    assert ("no nvcc 12.0 or newer found" in said) == (mode != "OFF")


def test_launch_of_defaults_is_what_the_kernels_take() -> None:
    tuning = CudaTuning()
    assert tuning.tile_nbytes % 16 == 0
    header = (SOURCES / "block_index.h").read_text()
    assert "static_assert(sizeof(Batch) <= 4096" in header


@needs_nvcc
@pytest.mark.skipif(not native.available(), reason="compiled module not built")
def test_a_build_with_nvcc_has_the_kernels_in_its_package() -> None:
    if not native.kernels():
        pytest.skip("built while there was no nvcc, or with KVTIERS_CUDA=OFF")
    assert native.kernels()[:4] == (0xBA55ED50).to_bytes(4, "little")  # a fatbin


@pytest.mark.skipif(not importlib.util.find_spec("cupy"), reason="no CuPy")
@pytest.mark.parametrize("capability", [80, 90])
def test_nvrtc_compiles_the_same_source(capability: int) -> None:
    """To PTX and to machine code; no device is needed for either."""
    ptx = compile_kernels(capability, machine_code=False).decode()
    assert f".target sm_{capability}" in ptx
    for name in ("kvtiers_gather", "kvtiers_scatter"):
        assert f".entry {name}(" in ptx
    assert ".local" not in ptx  # the batch stays in the launch's own arguments
    assert compile_kernels(capability)[:4] == b"\x7fELF"


def test_without_cupy_there_is_a_reason() -> None:
    if importlib.util.find_spec("cupy"):
        pytest.skip("CuPy is installed")
    with pytest.raises(RuntimeError, match="no CuPy"):
        compile_kernels(90)
