"""The CUDA kernels compile for every device, without spills; NVRTC takes the same source."""

from __future__ import annotations

import importlib.util
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from nvrtc_alone import Nvrtc, find_library

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


def contents(fatbin: bytes) -> set[tuple[str, int]]:
    """What a fatbin has: machine code or PTX, for which devices."""
    magic, _, start, nbytes = struct.unpack_from("<IHHQ", fatbin)
    assert magic == 0xBA55ED50
    found = set()
    at = start
    while at < start + nbytes:
        kind, _, header, size = struct.unpack_from("<HHIQ", fatbin, at)
        (packed,) = struct.unpack_from("<I", fatbin, at + 16)
        (target,) = struct.unpack_from("<I", fatbin, at + 28)
        assert packed == 0  # older drivers cannot unpack what newer compilers pack
        code = fatbin[at + header : at + header + size]
        assert code.startswith(b"\x7fELF") == (kind == 2)
        for name in (b"kvtiers_gather", b"kvtiers_scatter"):
            assert name in code
        found.add(("PTX" if kind == 1 else "machine code", target))
        at += header + size
    return found


CONTENTS = {("PTX", 80), *(("machine code", target) for target in TARGETS)}


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
    (fatbin,) = (tmp_path / "build").rglob("kernels.fatbin")
    assert contents(fatbin.read_bytes()) == CONTENTS  # PTX is for devices that are yet to come


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


PROBE = """
#include <cstdio>
#include "block_index.h"
int main() {
    using namespace kvtiers::kernel;
    std::printf("%zu %u %u %u", sizeof(Batch), kMaxRows, kThreads, kLanes);
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_launch_is_what_every_device_takes(tmp_path: Path) -> None:
    """4096 bytes of arguments, which is what drivers before 12.1 take; 1024 threads a block."""
    (tmp_path / "probe.cpp").write_text(PROBE)
    build = ["g++", "-std=c++17", f"-I{SOURCES}", "probe.cpp", "-o", "probe"]
    subprocess.run(build, cwd=tmp_path, check=True)
    said = subprocess.run(["./probe"], cwd=tmp_path, check=True, capture_output=True, text=True)
    nbytes, max_rows, threads, lanes = map(int, said.stdout.split())
    assert 4 * 2 * max_rows < nbytes <= 4096
    assert threads <= 1024
    assert threads % lanes == 0
    assert lanes == 32
    tuning = CudaTuning()
    assert tuning.tile_nbytes % 16 == 0
    assert 1 <= tuning.num_thread_blocks <= 12


@needs_nvcc
@pytest.mark.skipif(not native.available(), reason="compiled module not built")
def test_a_build_with_nvcc_has_the_kernels_in_its_package() -> None:
    if not native.kernels():
        pytest.skip("built while there was no nvcc, or with KVTIERS_CUDA=OFF")
    built = contents(native.kernels())
    assert {("PTX", 80), ("machine code", 80), ("machine code", 90)} <= built <= CONTENTS


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's compiler; where CuPy is not installed, the same one without CuPy around it."""
    if importlib.util.find_spec("cupy"):
        return
    library = find_library()
    if library is None:
        pytest.skip("no NVRTC")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "cupy" or found(name))
    cuda = SimpleNamespace(nvrtc=Nvrtc(library))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)


@pytest.mark.parametrize("capability", [80, 90])
def test_nvrtc_compiles_the_same_source(compiler: None, capability: int) -> None:
    """To PTX and to machine code; no device is needed for either."""
    ptx = compile_kernels(capability, machine_code=False).decode()
    assert f".target sm_{capability}" in ptx
    for name in ("kvtiers_gather", "kvtiers_scatter"):
        assert f".entry {name}(" in ptx
    assert ".local" not in ptx  # the batch stays in the launch's own arguments
    code = compile_kernels(capability)
    assert code.startswith(b"\x7fELF")
    assert b"kvtiers_gather" in code
    assert b"kvtiers_scatter" in code


def test_what_nvrtc_refuses_comes_with_its_log(
    compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "kernel_sources", lambda: ("no_such_type x;", "int y;"))
    with pytest.raises(RuntimeError, match=r'NVRTC refuses .*: .*kernels.cu.*"no_such_type"'):
        compile_kernels(90)
    monkeypatch.undo()


def test_a_device_that_nvrtc_does_not_know_is_a_reason(compiler: None) -> None:
    with pytest.raises(RuntimeError, match="NVRTC refuses the CUDA kernels: "):
        compile_kernels(999)


def test_without_cupy_there_is_a_reason() -> None:
    if importlib.util.find_spec("cupy"):
        pytest.skip("CuPy is installed")
    with pytest.raises(RuntimeError, match="no CuPy"):
        compile_kernels(90)
