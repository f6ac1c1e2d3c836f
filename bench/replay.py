"""How long the modelled engine takes to replay a trace through the real control plane.

Usage: python bench/replay.py TRACE.jsonl [--requests N]

The trace has Mooncake's format: an id covers 512 tokens. Llama-3.1-8B on one H100; DRAM of 0.5M
tokens, NVMe of 5M, LMDB of 10M. Prints CPU seconds and the memory of this process; the target is
60 s and 2 GiB for 12,031 requests.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import tempfile
import time
from pathlib import Path

from kvtiers.cost.catalogue import known_hardware, known_storage
from kvtiers.cost.engine_memory import EngineMemory
from kvtiers.cost.known_models import known_model
from kvtiers.engines.reference.modelled import ModelledMachine, modelled_engine
from kvtiers.engines.reference.requests import NewRequest
from kvtiers.engines.reference.serving import OpenLoop, drive
from kvtiers.engines.reference.settings import EngineSettings
from kvtiers.model.config import Config, parse_mapping

TOKENS_PER_ID = 512
TIERS = {"dram": 500_000, "nvme": 5_000_000, "lmdb": 10_000_000}


def requests_of(path: Path, num: int) -> list[NewRequest]:
    """Read a trace; ids become a chain of hashes, full blocks only."""
    requests = []
    for line in path.read_text().splitlines()[:num]:
        row = json.loads(line)
        hashes, parent = [], b""
        for found in row["hash_ids"][: row["input_length"] // TOKENS_PER_ID]:
            parent = hashlib.blake2b(parent + str(found).encode(), digest_size=32).digest()
            hashes.append(parent)
        requests.append(
            NewRequest(
                f"r{len(requests)}",
                row["timestamp"] / 1000,
                max(1, row["output_length"]),
                num_prompt_tokens=row["input_length"],
                block_hashes=hashes,
            )
        )
    return requests


def tiers(nbytes_per_id: int) -> Config:
    """Return the three tiers; nothing is ever made at their paths."""
    nowhere = Path(tempfile.gettempdir()) / "kvtiers-of-no-engine"
    sizes = {
        k: f"{-(-num // TOKENS_PER_ID * nbytes_per_id) // 2**20}MiB" for k, num in TIERS.items()
    }
    below = [
        {"kind": "nvme", "paths": [str(nowhere)], "capacity": sizes["nvme"], "write": "back"},
        {"kind": "lmdb", "path": f"{nowhere}.lmdb", "capacity": sizes["lmdb"], "write": "back"},
    ]
    dram = {"kind": "dram", "capacity": sizes["dram"], "pin": "off"}
    return parse_mapping({"tiers": [dram, *below]})


def main() -> None:
    """Replay, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=12_031)
    options = parser.parse_args()
    shape, hardware = known_model("llama-3.1-8b").shape, known_hardware("h100")
    stores = {"nvme": known_storage("nvme-gen5"), "lmdb": known_storage("nvme-gen4")}
    machine = ModelledMachine.of(shape, hardware, stores)
    pool = EngineMemory(shape, hardware, runtime_nbytes=4 * 10**9).pool
    settings = EngineSettings(pool.num_blocks, max_model_len=131_072, blocks_per_hash=32)
    engine = modelled_engine(settings, machine, tiers(32 * (16 * pool.kv_nbytes_per_token + 4096)))
    requests = requests_of(options.trace, options.requests)
    began, num_steps, served = time.process_time(), 0, []
    for report in drive(engine, OpenLoop(requests)):
        served += report.finished
        num_steps += 1
    seconds = time.process_time() - began
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    prompt, local, reloaded = (
        sum(getattr(it, f"num_{name}_tokens") for it in served)
        for name in ("prompt", "local", "reloaded")
    )
    print(
        f"{len(served)} requests, {num_steps} steps, {engine.now:.0f} s of traffic: "
        f"{seconds:.1f} s of CPU, {mib:.0f} MiB; of {prompt / 1e6:.1f}M prompt tokens "
        f"{local / 1e6:.1f}M were in HBM and {reloaded / 1e6:.1f}M were reloaded"
    )


if __name__ == "__main__":
    main()
