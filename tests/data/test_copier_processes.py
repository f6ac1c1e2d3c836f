"""The host copier among forks and threads, and where its compiled module is not to be had."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from kvtiers import native

needs_native = pytest.mark.skipif(not native.available(), reason="compiled module not built")
PREAMBLE = """
import numpy as np, os, sys, time, kvtiers
from kvtiers.data.copier import CopyBatch, Direction
from kvtiers.data.copier_host import make_host_copier
from kvtiers.data.slab import Slab
from kvtiers.model.frame import slot_nbytes_for
from kvtiers.model.layout import GroupLayout, KVLayout, Page, Run
from kvtiers.model.messages import int64s
n = 2**20
group = GroupLayout(0, 16, 16, None, "x", (Page("l", n),), (Run(0, 0, n, n),))
layout = KVLayout((16 * n,), (group,))
memory = np.repeat(np.arange(16, dtype=np.uint8), n)
slab = Slab(16, slot_nbytes_for([group]), pin="off")
def gather(copier, shift):
    ids = int64s(np.arange(16))
    copier.done(copier.submit(Direction.GATHER, CopyBatch(0, ids, (ids + shift) % 16), None))
    return all(set(slab.view((i + shift) % 16)[4096 : 4096 + n]) == {i} for i in range(16))
"""


def run_python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OPENBLAS_NUM_THREADS": "1",  # its threads come and go with a fork, and are counted here
    }
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PREAMBLE + program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@needs_native
def test_a_forked_child_copies_with_threads_of_its_own() -> None:
    ran = run_python(
        """
copier = make_host_copier(layout, [memory.ctypes.data], slab, 3, "on")
threads = lambda: len(os.listdir("/proc/self/task"))
one = threads()
assert gather(copier, 1) and threads() == one + 2
child = os.fork()
if child == 0:
    ok = threads() == 1 and gather(copier, 2) and threads() == 3
    del copier
    os._exit(0 if ok else 1)
assert os.waitpid(child, 0)[1] == 0
assert gather(copier, 3)
copier.close()
for _ in range(1000):  # the kernel lists a joined thread a moment longer
    if threads() == one: break
    time.sleep(0.01)
assert threads() == one
print("fine")
"""
    )
    assert ran.stdout == "fine\n", ran.stderr


@needs_native
def test_threads_share_one_copier() -> None:
    ran = run_python(
        """
import threading
slabs = [slab, *(Slab(16, slab.slot_nbytes, pin="off") for _ in range(3))]
copier = make_host_copier(layout, [memory.ctypes.data], slab, 2, "on")
ids = int64s(np.arange(16))
def work():
    for _ in range(20):
        copier.submit(Direction.GATHER, CopyBatch(0, ids, ids), None)
workers = [threading.Thread(target=work) for _ in range(4)]
for worker in workers: worker.start()
for worker in workers: worker.join()
assert gather(copier, 5)
print("fine")
"""
    )
    assert ran.stdout == "fine\n", ran.stderr


MODES = """
import logging
logging.basicConfig(format="%(message)s")
copiers = [make_host_copier(layout, [memory.ctypes.data], slab) for _ in range(3)]
assert all(gather(copier, 4) for copier in copiers)
try:
    make_host_copier(layout, [memory.ctypes.data], slab, mode="on")
except kvtiers.model.errors.KVTiersError as error:
    print(error)
"""
BROKEN = """
# An editable install has a finder of its own, which would find the sound module.
sys.meta_path[:] = [f for f in sys.meta_path if "Redirecting" not in type(f).__name__]
kvtiers.__path__.insert(0, sys.argv[1])
"""


@pytest.mark.parametrize(
    ("breakage", "reason"),
    [
        ("sys.modules['kvtiers._native'] = None", "None in sys.modules"),
        (BROKEN, "file too short|invalid ELF header"),
    ],
    ids=["missing", "broken"],
)
def test_without_the_compiled_module_numpy_copies_and_says_so_once(
    tmp_path: Path, breakage: str, reason: str
) -> None:
    """R115: an extension that does not load is one clear message, not the end."""
    (tmp_path / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}").write_bytes(b"no library\n")
    ran = run_python(breakage + MODES, str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("cannot be loaded") == 1
    assert "copying with numpy" in ran.stderr
    assert ran.stdout.count("cannot be loaded") == 1
    assert "pip install" in ran.stdout
    assert any(part in ran.stdout for part in reason.split("|")), ran.stdout
