"""The commands that look after stores: what they print, ask, and exit with."""

import json
import os
import signal
import subprocess
import sys

import pytest
from lmdb_box import Box, image, key_of, settings_of
from store_boxes import FileBox, OwningProcess, stopped_store
from typer.testing import CliRunner

from kvtiers.cli.main import app
from kvtiers.model.outcome import Outcome
from kvtiers.testing.store_suite import SLOT_NBYTES


def kvtiers(*arguments, answer=None):
    return CliRunner().invoke(app, ["store", *map(str, arguments)], input=answer)


@pytest.fixture
def files(tmp_path):
    """A stopped file store of 10 frames."""
    path = tmp_path / "nvme"
    stopped_store(path)
    return path


@pytest.fixture
def shared(tmp_path):
    """A stopped LMDB store of 10 frames."""
    path = tmp_path / "lmdb"
    box = Box(settings_of(path))
    assert set(box.put(*range(10))) == {Outcome.OK}
    box.close()
    return path


def spoil(path, number):
    """Change a byte of a frame."""
    (slab,) = path.glob("*/*/frames.slab")
    at = slab.read_bytes().index(image(number))
    with slab.open("r+b") as file:
        file.seek(at + 6000)
        file.write(b"\xff\xfe")


def test_stat_is_a_table(files, shared):
    result = kvtiers("stat", files, shared)
    assert result.exit_code == 0, result.output
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert [line.split(None, 1)[1] for line in lines if line.startswith("kind")] == ["nvme", "lmdb"]
    assert any(line.startswith("frames") and line.endswith("10") for line in lines)
    assert "no: stopped" in result.stdout
    assert f"of {SLOT_NBYTES:,} bytes" in result.stdout
    assert "none recorded" in result.stdout


def test_stat_as_json(files, shared):
    result = kvtiers("stat", files, shared, "--json")
    nvme, lmdb = json.loads(result.stdout)["stores"]
    assert (nvme["kind"], nvme["num_frames"], nvme["owner"]) == ("nvme", 10, None)
    assert (lmdb["kind"], lmdb["num_frames"], lmdb["slot_nbytes"]) == ("lmdb", 10, None)


def test_stat_of_a_running_store_names_its_owner(files):
    with OwningProcess(files, num=3) as owner:
        result = kvtiers("stat", files)
        assert f"by process {owner.pid} on host" in " ".join(result.stdout.split())
        assert "since" in result.stdout
        found = json.loads(kvtiers("stat", files, "--json").stdout)["stores"][0]["owner"]
        assert found["pids"] == [owner.pid]


def test_verify_of_good_stores_is_a_line_each(files, shared):
    result = kvtiers("verify", files, shared)
    assert result.exit_code == 0, result.output
    first, second = result.stdout.splitlines()
    assert first.startswith(str(files))
    assert "10 frames good, 0 damaged; " in first
    assert "MiB/s)" in first
    assert second.startswith(f"{shared}: 10 frames good, 0 damaged")


def test_verify_exits_1_for_a_damaged_frame_and_drops_it(files):
    spoil(files, 4)
    dry = kvtiers("verify", files, "--dry-run")
    assert dry.exit_code == 1
    assert "1 damaged" in dry.stdout
    assert "dry run: nothing was dropped" in dry.stdout
    result = kvtiers("verify", files)
    assert result.exit_code == 1
    assert f"frame {key_of(4).hex()[:16]}: page 0 does not have the checksum" in result.stdout
    assert "1 dropped, never to be served" in result.stdout
    assert kvtiers("verify", files).exit_code == 0


def test_verify_as_json(files):
    spoil(files, 4)
    result = kvtiers("verify", files, "--json")
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["ok"]) == (1, False)
    (found,) = answer["stores"]
    assert (found["num_good"], found["num_quarantined"]) == (9, 1)
    assert found["faults"][0]["key"] == key_of(4).hex()


def test_clear_asks_first(files):
    result = kvtiers("clear", files, answer="n\n")
    assert result.exit_code == 1
    assert "Drop every frame of these?" in result.stderr
    assert json.loads(kvtiers("stat", files, "--json").stdout)["stores"][0]["num_frames"] == 10
    result = kvtiers("clear", files, answer="y\n")
    assert result.exit_code == 0
    assert "10 frames dropped, 0 left" in result.stdout


def test_clear_without_an_answer_drops_nothing(files):
    assert kvtiers("clear", files, answer="").exit_code == 1
    assert json.loads(kvtiers("stat", files, "--json").stdout)["stores"][0]["num_frames"] == 10


def test_clear_of_several_with_yes(files, shared):
    result = kvtiers("clear", files, shared, "--yes", "--json")
    assert result.exit_code == 0
    stores = json.loads(result.stdout)["stores"]
    assert [(s["num_frames"], s["num_left"]) for s in stores] == [(10, 0), (10, 0)]


def test_evict_keeps_a_size(files):
    result = kvtiers("evict", files, "--to", f"{4 * SLOT_NBYTES}B")
    assert result.exit_code == 0, result.output
    assert "6 frames dropped, 4 left" in result.stdout
    box = FileBox(files)
    assert box.numbers() == [6, 7, 8, 9]
    box.close()


@pytest.mark.parametrize("size", ["64", "64GIB", "much", ""])
def test_evict_wants_a_size_with_a_unit(files, size):
    result = kvtiers("evict", files, "--to", size)
    assert result.exit_code == 2
    assert result.stderr.startswith("--to: ")
    assert result.stdout == ""
    as_json = json.loads(kvtiers("evict", files, "--to", size, "--json").stdout)
    assert as_json == {"ok": False, "problems": result.stderr.splitlines()}


def test_a_running_store_is_cleared_by_its_owner(files):
    with OwningProcess(files, num=3) as owner:
        result = kvtiers("clear", files, "-y")
        assert "frames dropped by the process that has it open, 0 left" in result.stdout
        assert owner.get(0) == ["MISSING"]


def test_an_owner_that_does_not_answer_in_time_exits_1(files):
    with OwningProcess(files, num=3) as owner:
        owner.signal(signal.SIGSTOP)
        result = kvtiers("clear", files, "-y", "--patience", "0.2")
        owner.signal(signal.SIGCONT)
        assert result.exit_code == 1
        assert f"process {owner.pid} on host" in result.stderr
        assert owner.get(0) == ["OK"]


@pytest.mark.parametrize("verb", ["stat", "verify", "clear", "evict"])
def test_what_is_no_store_exits_2(tmp_path, verb):
    more = {"clear": ["--yes"], "evict": ["--to", "1GiB"]}.get(verb, [])
    result = kvtiers(verb, tmp_path, *more)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"{tmp_path} holds no store; name the `path` of an lmdb tier")
    result = kvtiers(verb, tmp_path / "none", *more, "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["ok"] is False
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_store_that_may_not_be_read_exits_2(files, shared):
    assert kvtiers("stat", files, shared).exit_code == 0
    for path in (files, shared):
        os.seteuid(65534)
        try:
            result = kvtiers("stat", path)
        finally:
            os.seteuid(0)
        assert result.exit_code == 2, result.output
        assert f"{path} may not be read by user 65534: Permission denied" in result.stderr


def test_progress_is_shown_in_a_real_process(files):
    command = [sys.executable, "-m", "kvtiers", "store", "verify", str(files)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "10 of 10 frames" in result.stderr
    assert "10 frames good" in result.stdout
