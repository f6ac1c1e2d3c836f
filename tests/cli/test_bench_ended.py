"""A measured bench that is ended from outside leaves nothing on the disk."""

import signal
import subprocess
import sys
import time

import pytest


@pytest.fixture
def interruptible():
    """Shells start background jobs, and all that these start, with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_bench_that_is_ended_removes_its_stores(tmp_path, ending):
    options = ("--length", "64,128,256", "--repeats", "500", "--threads", "1")
    command = [sys.executable, "-m", "kvtiers", "bench", *options, "--folder", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            deadline = time.monotonic() + 60
            while not list(tmp_path.rglob("lock")):
                assert time.monotonic() < deadline
                assert process.poll() is None, process.communicate()
                time.sleep(0.05)
            time.sleep(0.5)
            process.send_signal(ending)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert b"Traceback" not in said
    assert list(tmp_path.iterdir()) == []
