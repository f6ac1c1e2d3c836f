"""What others have for the same: vLLM's own file tier, fio, and LMCache's adapters."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from file_sides import BATCH, UNDER_WAY, Side, slots_of

from kvtiers.data.io.base import DEFAULT_DEPTH
from kvtiers.data.slab import Slab


def has_vllm_tier() -> bool:
    """Return whether vLLM's tier on a file system is installed."""
    try:
        from vllm.v1.kv_offload.tiering.fs import manager  # noqa: F401, PLC0415
    except ImportError:
        return False
    return True


class VllmSide(Side):
    """vLLM's `FileSystemTierManager` as it comes: 16 + 16 threads, its compiled helper if there.

    It writes a file a block under a temporary name and renames it, and syncs nothing. What it is
    given as one job it moves one block after another; both ways to cut a batch are measured.

    Args:
        job_blocks: blocks of one job: `BATCH`, or 1.
    """

    def __init__(self, job_blocks: int, slab: Slab, folder: Path, num_frames: int) -> None:
        from vllm.v1.kv_offload.tiering.fs import io, manager  # noqa: PLC0415

        self.helper = "compiled" if io._HAS_FSIO_C else "Python"
        self.name = f"vLLM, a job a {'block' if job_blocks == 1 else 'batch'}"
        memory = (ctypes.c_char * (slab.num_slots * slab.slot_nbytes)).from_address(slab.address)
        view = memoryview(memory).cast("B").cast("B", (slab.num_slots, slab.slot_nbytes))
        self._tier = manager.FileSystemTierManager(
            _spec(), view, "fs", str(folder / f"vllm-{job_blocks}")
        )
        self._job_blocks = job_blocks
        self._num_batches = num_frames // BATCH
        self._life = 0
        self._jobs: dict[int, int] = {}  # batch of each
        self._num_pending: Counter[int] = Counter()

    def submit(self, batch: int, *, writes: bool) -> None:
        from vllm.v1.kv_offload.tiering.base import TransferJob  # noqa: PLC0415

        life = self._life if writes else self._life - 1
        keys, slots = self._keys(life, batch), np.array(slots_of(batch), np.int64)
        for start in range(0, BATCH, self._job_blocks):
            job_id = batch * BATCH + start
            part = slice(start, start + self._job_blocks)
            job = TransferJob(job_id, keys[part], slots[part], not writes, None)
            self._jobs[job_id] = batch
            self._num_pending[batch] += 1
            (self._tier.submit_store if writes else self._tier.submit_load)(job)

    def num_ended(self) -> int:
        ended = 0
        for result in self._tier.get_finished_jobs():
            assert result.success, result
            batch = self._jobs.pop(result.job_id)
            self._num_pending[batch] -= 1
            ended += self._num_pending[batch] == 0
        return ended

    def after(self, *, writes: bool) -> None:
        """Remove the files that were read: it would skip names that exist."""
        if writes:
            self._life += 1
            return
        for batch in range(self._num_batches):
            for key in self._keys(self._life - 1, batch):
                with contextlib.suppress(FileNotFoundError):  # a sample may be shorter
                    os.unlink(self._tier.file_mapper.get_file_name(key))

    def close(self) -> None:
        self._tier.shutdown()

    @staticmethod
    def _keys(life: int, batch: int) -> list[Any]:
        from vllm.v1.kv_offload.base import make_offload_key  # noqa: PLC0415

        # the hash comes first in a name, so that files spread over folders as they do in use
        return [
            make_offload_key(
                ((life << 40 | batch << 8 | i) * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "big")
                + b"%8d%8d%8d" % (life, batch, i),
                0,
            )
            for i in range(BATCH)
        ]


def _spec() -> Any:
    """Return what the tier wants to know of an engine, for the names of its files."""
    group = SimpleNamespace(tokens_per_block=16, layer_names=["layer"])
    config = SimpleNamespace(
        groups=[group],
        parallel=SimpleNamespace(
            tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=True
        ),
        canonical_layout=False,
        replicated_layout=False,
        model=SimpleNamespace(name="bench", dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=16),
    )
    return SimpleNamespace(config=config, blocks_per_chunk=1)


class FioSide(Side):
    """fio over the raw sides' file: sequential, direct, through io_uring at our depth."""

    def __init__(self, program: str, path: Path, frame_nbytes: int) -> None:
        self.name = "raw, fio"
        self._command = [
            program,
            "--name=x",
            f"--filename={path}",
            f"--bs={frame_nbytes}",
            "--direct=1",
            "--ioengine=io_uring",
            f"--iodepth={DEFAULT_DEPTH}",
            "--output-format=json",
        ]
        self._frame_nbytes = frame_nbytes

    def sample(self, num_batches: int, *, writes: bool) -> tuple[float, float]:
        """Let it move as many bytes; it measures itself."""
        way = "write" if writes else "read"
        size = num_batches * BATCH * self._frame_nbytes
        found = subprocess.run(
            [*self._command, f"--rw={way}", f"--size={size}"], check=True, capture_output=True
        )
        job = json.loads(found.stdout)["jobs"][0]
        seconds = size / job[way]["bw_bytes"]
        return seconds, seconds * (job["usr_cpu"] + job["sys_cpu"]) / 100


def lmcache_rates(
    program: str, folder: Path, frame_nbytes: int, num_batches: int
) -> dict[str, dict[str, float]]:
    """Run `lmcache bench l2` with its native file adapter; returns GB/s of each direction.

    One batch a submission and four submissions a round, as the other sides have them; it waits
    for a whole round before it begins the next. Its adapter of raw blocks needs an extension in
    Rust that its wheel does not have.
    """
    command = [program, "bench", "l2", "--format", "json", "--l1-align-bytes", "4096"]
    command += ["--num-keys", str(BATCH), "--in-flight", str(UNDER_WAY)]
    command += ["--rounds", str(num_batches // UNDER_WAY)]
    command += ["--data-size-kb", str(frame_nbytes // 1024)]
    rates = {}
    for workers in (4, DEFAULT_DEPTH):
        place = folder / "lmcache"
        place.mkdir()
        adapter = {"type": "fs_native", "base_path": str(place), "use_odirect": True}
        adapter["num_workers"] = workers
        found = subprocess.run(
            [*command, "--l2-adapter", json.dumps(adapter)],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "LMCACHE_DISABLE_BANNER": "1"},
        )
        shutil.rmtree(place)
        rates[f"LMCache, fs_native, {workers} workers"] = _lmcache_result(
            found.stdout, frame_nbytes
        )
    return rates


def _lmcache_result(text: str, frame_nbytes: int) -> dict[str, float]:
    ops = json.loads(text[text.index("\n{") : text.rindex("}") + 1])
    rates = {}
    for op in _with_operation(ops):
        if op["operation"] in ("Store", "Load"):
            assert op["total_success"] == op["total_keys"], op
            nbytes = op["keys_per_round"] * frame_nbytes
            rate = nbytes / (op["duration_avg_ms"] * 1e-3) / 1e9
            rates["write" if op["operation"] == "Store" else "read"] = rate
    return rates


def _with_operation(found: Any) -> Iterator[dict[str, Any]]:
    """Yield the tables of operations, wherever in the report they are."""
    if isinstance(found, dict):
        if "operation" in found:
            yield found
        for value in found.values():
            yield from _with_operation(value)
