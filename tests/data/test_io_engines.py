"""The engines of file I/O: same bytes, same answers."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtiers import native
from kvtiers.data.io import choice
from kvtiers.data.io.base import IoBatch, IoDone, IoOp
from kvtiers.data.io.choice import make_io
from kvtiers.data.io.native import NativeIo
from kvtiers.data.slab import Slab

PAGE = 4096
KINDS = ["native", "uring", "aiofiles"]


@pytest.fixture(params=KINDS)
def engine(request):
    if request.param != "aiofiles" and not native.available():
        pytest.skip("needs the compiled module")
    engine = make_io(request.param, 4)
    assert engine.name == request.param
    yield engine
    engine.close()


@pytest.fixture
def memory():
    slab = Slab(64, PAGE, pin="off")
    yield slab
    slab.close()


@pytest.fixture
def file(tmp_path):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"".join(bytes([i]) * PAGE for i in range(16)), 0)
    yield fd
    os.close(fd)


def ended(engine, num=1) -> list[IoDone]:
    found: list[IoDone] = []
    deadline = time.monotonic() + 20
    while len(found) < num:
        found += engine.poll()
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    return sorted(found, key=lambda done: done.batch_id)


def pieces(memory, *slots):
    return tuple((memory.address + slot * PAGE, PAGE) for slot in slots)


def test_scattered_read(engine, memory, file):
    ops = (IoOp(file, 2 * PAGE, pieces(memory, 9, 3, 5)), IoOp(file, 0, pieces(memory, 1)))
    engine.submit(IoBatch(7, False, ops))
    assert ended(engine) == [IoDone(7, (3 * PAGE, PAGE))]
    assert [memory.view(slot)[0] for slot in (9, 3, 5, 1)] == [2, 3, 4, 0]
    assert engine.poll() == []


def test_gathered_write(engine, memory, file):
    for slot in range(4):
        memory.view(slot)[:] = bytes([100 + slot]) * PAGE
    engine.submit(IoBatch(1, True, (IoOp(file, PAGE, pieces(memory, 2, 0, 3)),)))
    assert ended(engine) == [IoDone(1, (3 * PAGE,))]
    assert [os.pread(file, 1, i * PAGE)[0] for i in range(5)] == [0, 102, 100, 103, 4]


def test_many_batches_more_than_the_depth(engine, memory, file):
    for number in range(50):
        ops = tuple(IoOp(file, i * PAGE, pieces(memory, i)) for i in range(number % 16 + 1))
        engine.submit(IoBatch(number, False, ops))
    results = ended(engine, 50)
    assert [done.results for done in results] == [(PAGE,) * (n % 16 + 1) for n in range(50)]


def test_more_pieces_than_one_call_takes(engine, tmp_path):
    """IOV_MAX is 1024; the rest goes with the next call."""
    slab = Slab(1500, PAGE, pin="off")
    fd = os.open(tmp_path / "long", os.O_RDWR | os.O_CREAT)
    for slot in range(1500):
        slab.view(slot)[:2] = slot.to_bytes(2, "big")
    backwards = pieces(slab, *reversed(range(1500)))
    engine.submit(IoBatch(1, True, (IoOp(fd, 0, backwards),)))
    assert ended(engine) == [IoDone(1, (1500 * PAGE,))]
    assert os.pread(fd, 2, 3 * PAGE) == (1496).to_bytes(2, "big")
    os.close(fd)
    slab.close()


def test_end_of_file_is_a_short_count(engine, memory, file):
    ops = (
        IoOp(file, 15 * PAGE, pieces(memory, 0, 1)),
        IoOp(file, 99 * PAGE, pieces(memory, 2)),
    )
    engine.submit(IoBatch(1, False, ops))
    assert ended(engine) == [IoDone(1, (PAGE, 0))]


def test_end_of_a_file_that_was_cut_inside_a_sector(engine, memory, tmp_path):
    path = tmp_path / "cut"
    path.write_bytes(bytes(PAGE + 100))
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    engine.submit(IoBatch(1, False, (IoOp(fd, 0, pieces(memory, 0, 1)),)))
    assert ended(engine) == [IoDone(1, (PAGE + 100,))]
    os.close(fd)


def test_errors_are_told_per_operation(engine, memory, file, tmp_path):
    only_read = os.open(tmp_path / "file", os.O_RDONLY)
    ops = (
        IoOp(only_read, 0, pieces(memory, 0)),
        IoOp(file, 0, pieces(memory, 1)),
        IoOp(12345, 0, pieces(memory, 2)),
    )
    engine.submit(IoBatch(1, True, ops))
    assert ended(engine) == [IoDone(1, (-errno.EBADF, PAGE, -errno.EBADF))]
    os.close(only_read)


def test_memory_that_is_not_there_is_an_error(engine, file):
    if engine.name == "aiofiles":
        pytest.skip("Python would read it itself")
    engine.submit(IoBatch(1, False, (IoOp(file, 0, ((PAGE, PAGE),)),)))
    assert ended(engine) == [IoDone(1, (-errno.EFAULT,))]


def test_misaligned_direct_write_is_einval(engine, memory, tmp_path):
    fd = os.open(tmp_path / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    engine.submit(IoBatch(1, True, (IoOp(fd, 0, ((memory.address + 1, 5000),)),)))
    (done,) = ended(engine)
    if done.results[0] > 0:
        pytest.skip("this file system takes anything")
    assert done.results == (-errno.EINVAL,)
    assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
    os.close(fd)


def test_empty_batch(engine):
    engine.submit(IoBatch(3, True, ()))
    assert ended(engine) == [IoDone(3, ())]


def test_close_waits_and_keeps_the_answers(engine, memory, file):
    for number in range(20):
        engine.submit(IoBatch(number, False, (IoOp(file, 0, pieces(memory, number)),)))
    engine.close()
    engine.close()
    assert len(engine.poll()) == 20


FULL_FILE = """
import resource, signal, sys, os
from kvtiers.data.io.base import IoBatch, IoOp
from kvtiers.data.io.choice import make_io
from kvtiers.data.slab import Slab
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
slab = Slab(4, 4096, pin="off")
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
engine = make_io(sys.argv[2])
engine.submit(IoBatch(1, True, (IoOp(fd, 0, ((slab.address, 8192),)),)))
while not (done := engine.poll()): pass
print(done[0].results[0])
engine.close()
"""


@pytest.mark.parametrize("kind", KINDS)
def test_limit_of_a_file_is_found_behind_a_short_count(tmp_path, kind):
    """As ENOSPC is: the first call writes what fits, only the second one fails."""
    if kind != "aiofiles" and not native.available():
        pytest.skip("needs the compiled module")
    command = [sys.executable, "-c", FULL_FILE, str(tmp_path / "file"), kind]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert int(told.stdout) == -errno.EFBIG
    assert resource.getrlimit(resource.RLIMIT_FSIZE)


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.ENOMEM])
def test_refused_io_uring_falls_back_with_one_line(monkeypatch, caplog, code):
    """R66: container profiles forbid it."""
    if not native.available():
        pytest.skip("needs the compiled module")

    class Refused(NativeIo):
        def __init__(self, kind="native", depth=4):
            if kind == "uring":
                raise OSError(code, os.strerror(code))
            super().__init__(kind, depth)

    monkeypatch.setattr(choice, "NativeIo", Refused)
    engine = make_io("uring")
    assert engine.name == "native"
    assert [os.strerror(code) in record.message for record in caplog.records] == [True]
    engine.close()


def test_io_uring_that_the_system_refuses():
    if not native.available():
        pytest.skip("needs the compiled module")
    with pytest.raises(OSError, match="Invalid argument"):
        native.load().uring_file_io(2**20)


def test_without_the_compiled_module_aiofiles_serves(monkeypatch, caplog):
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(native, "problem", lambda: "not built")
    engine = make_io("auto")
    assert engine.name == "aiofiles"
    assert [record.message for record in caplog.records] == ["file I/O through aiofiles: not built"]
    engine.close()


@pytest.mark.parametrize(("kind", "depth"), [("auto", 0), ("fast", 4)])
def test_wrong_choice(kind, depth):
    with pytest.raises(ValueError, match=r"fast|depth 0"):
        make_io(kind, depth)


def test_aiofiles_leaves_no_kernel_context_behind(memory, file):
    """R64: the pool is bounded, and nothing is asked of the kernel's own asynchronous I/O."""
    counter = Path("/proc/sys/fs/aio-nr")
    before = counter.read_text()
    for _ in range(5):
        engine = make_io("aiofiles", 4)
        for number in range(200):
            engine.submit(IoBatch(number, False, (IoOp(file, 0, pieces(memory, number % 64)),)))
        engine.close()
        assert len(engine.poll()) == 200
    assert counter.read_text() == before
