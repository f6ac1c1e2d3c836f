"""The compiled copier is free of undefined behaviour, by the word of the compiler's sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "csrc" / "host"
FILES = ("selftest", "block_copier", "block_plan", "cache", "stream_copy", "thread_pool")
FLAGS = ("-std=c++17", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("generic", [False, True], ids=["simd", "generic"])
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_copier_is_clean_under(sanitizer: str, generic: bool, tmp_path: Path) -> None:
    program = tmp_path / "selftest"
    subprocess.run(
        [
            "g++",
            *FLAGS,
            f"-fsanitize={sanitizer}",
            "-fno-sanitize-recover=all",
            *(["-DKVTIERS_GENERIC"] if generic else []),
            *(str(SOURCES / f"{name}.cpp") for name in FILES),
            "-o",
            str(program),
        ],
        check=True,
    )
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=300)
    if "unexpected memory mapping" in ran.stderr:
        pytest.skip("this kernel's address randomisation is more than the sanitizer can bear")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout == "all well\n"
