"""Options of the benches are judged before anything is measured."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


def bench(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("held_up.py", ("--repeats", "1"), "'1' is no whole number of at least 2"),
        ("lmdb_store.py", ("--pairs", "0"), "'0' is no whole number of at least 2"),
        ("file_store.py", ("--folder", "/nowhere"), "'/nowhere' is no folder; make it"),
        ("load_flow.py", ("--folder", "/nowhere", "--portions", "5"), "'5' is not FRAMES,MIB"),
        ("replay.py", ("/nowhere.jsonl",), "/nowhere.jsonl: no such file"),
        ("host_copy.py", ("--again",), "name its file with --out"),
    ],
)
def test_wrong_option_is_told_without_a_traceback(name, arguments, problem):
    found = bench(name, *arguments)
    assert (found.returncode, found.stdout) == (2, "")
    assert problem in found.stderr
    assert "Traceback" not in found.stderr


def test_folder_to_be_measured_keeps_what_is_in_it(tmp_path):
    """The store's files have names that somebody else's may have."""
    (tmp_path / "native").mkdir()
    sizes = ("--repeats", "0", "--sizes", "131072")
    found = bench("file_store.py", "--folder", str(tmp_path), *sizes)
    assert found.returncode == 0, found.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["native"]
