"""A wheel that is built where there is no nvcc works, and says what it lacks."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
BUILD = ("scikit_build_core", "nanobind")

QUESTIONS = """
import logging, kvtiers
logging.basicConfig(format="%(message)s")
from kvtiers import native
from kvtiers.data.copier_cuda_make import make_cuda_copier
from kvtiers.data.cuda_device import CudaDevice, find_device
from kvtiers.data.slab import Slab
from kvtiers.testing.fake_device import make_layout
assert native.available(), native.problem()
print("kernels:", len(native.kernels()), "sources:", all(native.kernel_sources()))
print("device:", find_device(0, int, "libcuda-that-is-not-there.so"))
layout = make_layout(4, [[64]])
slab = Slab(4, 8192, pin="off")
slab.__class__ = type("Pinned", (Slab,), {"pinned": True})
driver = type("Driver", (), {"compute_capability": lambda self, number: 90})()
device = CudaDevice(driver, 0, int)
print("copier:", make_cuda_copier(layout, [4096], slab, device, lambda: "the fallback"))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, BUILD)), reason="not installed: " + ", ".join(BUILD)
)
def test_a_wheel_built_without_nvcc_works(tmp_path: Path) -> None:
    """``false`` passes for nvcc: one may lie where CMake looks, whatever the PATH is."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    options = ["cmake.define.KVTIERS_NVCC=false", f"build-dir={tmp_path / 'build'}"]
    flags = [flag for option in options for flag in ("--config-settings", option)]
    ran = subprocess.run(
        [*build, *flags, str(REPOSITORY)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as files:
        files.extractall(installed)
        names = set(files.namelist())
    assert "kvtiers/kernels/kernels.cu" in names
    assert "kvtiers/kernels/block_index.h" in names
    assert not any(name.endswith(".fatbin") for name in names)
    program = f"import sys; sys.path.insert(0, {str(installed)!r})\n" + QUESTIONS
    program += f"assert kvtiers.__file__.startswith({str(installed)!r}), kvtiers.__file__\n"
    ran = subprocess.run(
        # Python's own finders are classes. Others, such as an editable install's, come first.
        [
            sys.executable,
            "-c",
            "import sys\nsys.meta_path = [f for f in sys.meta_path if isinstance(f, type)]\n"
            + program,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "kernels: 0 sources: True" in ran.stdout
    assert "device: no CUDA driver: libcuda-that-is-not-there.so" in ran.stdout
    assert "copier: the fallback" in ran.stdout
    assert "kernels of this build: none in this build of kvtiers" in ran.stderr
