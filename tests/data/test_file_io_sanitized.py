"""The compiled file engines are free of races and undefined behaviour, as sanitizers see it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "csrc" / "host"
FILES = ("file_io_selftest", "file_io", "uring_io")
FLAGS = ("-std=c++17", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize(
    ("sanitizer", "engine"),
    [("address,undefined", ()), ("address,undefined", ("uring",)), ("thread", ())],
)
def test_file_engines_are_clean_under(
    sanitizer: str, engine: tuple[str, ...], tmp_path: Path
) -> None:
    program = tmp_path / "selftest"
    sources = [str(SOURCES / f"{name}.cpp") for name in FILES]
    flags = [*FLAGS, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    subprocess.run(["g++", *flags, *sources, "-o", str(program)], check=True)
    command = [str(program), str(tmp_path / "file"), *engine]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if "unexpected memory mapping" in ran.stderr:
        pytest.skip("this kernel's address randomisation is more than the sanitizer can bear")
    if ran.stdout.startswith("refused"):
        pytest.skip(ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout == "all well\n"
