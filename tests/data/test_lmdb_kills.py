"""Processes that are killed, or overtaken, anywhere in what they do to an LMDB store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvtiers.data.lmdb_settings import WriteMap

FOLDER = Path(__file__).parent


def run(program: str, *arguments: object, seconds: float = 300) -> str:
    """Run a program beside this file to its end; returns what it printed."""
    command = [sys.executable, str(FOLDER / program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("write_map", list(WriteMap))
@pytest.mark.parametrize(("verb", "stride"), [("create", 5), ("reopen", 3), ("grow", 4)])
def test_process_killed_at_any_step_loses_nothing(
    verb: str, stride: int, write_map: WriteMap, tmp_path: Path
) -> None:
    """What was killed over making, opening, closing or growing is neither lost nor set aside."""
    kills = int(run("lmdb_steps.py", verb, tmp_path / "store", stride, write_map.value))
    assert kills > 50


@pytest.mark.slow
@pytest.mark.parametrize("write_map", list(WriteMap))
@pytest.mark.parametrize("verb", ["create", "reopen", "grow"])
def test_process_killed_at_every_step_loses_nothing(
    verb: str, write_map: WriteMap, tmp_path: Path
) -> None:
    kills = int(run("lmdb_steps.py", verb, tmp_path / "store", 1, write_map.value))
    assert kills > 200


def test_process_that_opens_while_another_grows_cuts_nothing(tmp_path: Path) -> None:
    """LMDB cuts a file to the size that its opener says, which may be one from before."""
    run("lmdb_races.py", "open_while_it_grows", tmp_path / "store")


def test_process_that_had_it_open_uses_what_another_has_grown(tmp_path: Path) -> None:
    run("lmdb_races.py", "fill_what_another_has_grown", tmp_path / "store")
