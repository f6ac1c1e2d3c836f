"""A replay or a search that a signal ends: it tells what it has, and says so by its exit code."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from simulating import ENGINE

LONG = ("--generate", "chat", "--requests", "20000", "--rate", "8")


@pytest.fixture
def interruptible():
    """Shells start background jobs, and all that these start, with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Terminal:
    """What a verb writes to standard error, as it would be seen: with its progress bars."""

    def __init__(self):
        self.said = b""
        self._reader, self.writer = pty.openpty()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self):
        try:
            while more := os.read(self._reader, 4096):
                self.said += more
        except OSError:
            pass  # the other side is closed

    def close(self):
        os.close(self.writer)
        self._thread.join(5)
        os.close(self._reader)


def ended(*args: str, by: int = signal.SIGINT, group: bool = True) -> tuple[int, bytes, bytes]:
    """Run a verb, and interrupt it once it has shown that requests were served.

    Args:
        group: with its children, as a terminal and systemd do.
    """
    command = [sys.executable, "-m", "kvtiers", *args, *ENGINE, *LONG]
    terminal, pipe = Terminal(), subprocess.PIPE
    with subprocess.Popen(
        command, stderr=terminal.writer, stdout=pipe, start_new_session=True
    ) as process:
        try:
            deadline = time.monotonic() + 120
            while not re.search(rb"[1-9][0-9]*/20000", terminal.said):
                assert time.monotonic() < deadline, terminal.said
                assert process.poll() is None, terminal.said
                time.sleep(0.02)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            if group:
                os.killpg(process.pid, by)
            else:
                process.send_signal(by)
            out, _ = process.communicate(timeout=60)
            deadline = time.monotonic() + 20
            while any(Path("/proc", child).exists() for child in children):
                assert time.monotonic() < deadline, "a process was left behind"
                time.sleep(0.05)
        finally:
            process.kill()
    terminal.close()
    return process.returncode, out, terminal.said


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_replay_that_is_interrupted_tells_what_was_served(tmp_path, by):
    paths = [tmp_path / name for name in ("first.yaml", "second.yaml")]
    for path in paths:
        path.write_text("tiers: [{kind: dram, capacity: 4GiB}]")
    args = ("simulate", "--compare", *map(str, paths), "--output", str(tmp_path / "out"))
    code, out, said = ended(*args, by=by)
    assert code == 130
    assert b"interrupted before it was replayed: second" in said
    assert b"It was interrupted before every request was served" in out.replace(b"\n", b" ")
    assert b"Traceback" not in said
    (page,) = (tmp_path / "out").glob("*.json")
    replays = json.loads(page.read_text())["replays"]
    assert [it["label"] for it in replays] == ["first"]
    assert replays[0]["interrupted"]
    assert 0 < replays[0]["num_requests"] < 20_000


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_search_that_is_interrupted_tells_what_was_found(jobs, by):
    args = ("size", "--replicas", "1", "--goal", "hit-rate=0.5", "--jobs", jobs)
    code, out, said = ended(*args, by=by)
    assert code == 130
    assert b"Traceback" not in said
    assert b"It was interrupted before all sizes were compared" in out.replace(b"\n", b" ")


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("by", "code"), [(signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_a_search_that_is_ended_leaves_no_process(by, code):
    args = ("size", "--replicas", "1", "--goal", "hit-rate=0.5", "--jobs", "2")
    assert ended(*args, by=by, group=False)[0] == code


def test_an_interrupt_while_the_command_line_is_imported_gives_no_traceback():
    program = """
import runpy, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
runpy.run_module("kvtiers", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (130, b"")
