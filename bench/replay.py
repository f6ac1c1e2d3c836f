"""How long the modelled engine takes to replay a trace through the real control plane.

Usage: python bench/replay.py TRACE [--requests N] [--policy RULE]

The trace is a JSONL file of conversations or a folder of coding-agent sessions. Engine blocks have
16 tokens; 32 of them travel as one run, so that the `Controller` sees blocks of 512 tokens: what
32 times as many blocks of 16 would cost it is not measured here. Llama-3.1-8B on one H100; DRAM of
0.5M tokens, NVMe of 5M, LMDB of 10M. Prints CPU seconds and the memory of this process; the target
is 60 s and 2 GiB for the 12,031 requests of the conversation trace.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

from options import at_least

from kvtiers.control.policy import POLICIES
from kvtiers.cost.catalogue import known_hardware, known_storage
from kvtiers.cost.engine_memory import EngineMemory
from kvtiers.cost.known_models import known_model
from kvtiers.engines.reference.modelled import ModelledMachine, modelled_engine
from kvtiers.engines.reference.requests import NewRequest
from kvtiers.engines.reference.serving import OpenLoop, drive
from kvtiers.engines.reference.settings import EngineSettings
from kvtiers.model.config import Config, PolicyConfig, parse_mapping
from kvtiers.model.errors import KVTiersError
from kvtiers.simulate.trace import load_trace

BLOCKS_PER_RUN = 32  # engine blocks of 16 tokens
TOKENS_PER_BLOCK = 16 * BLOCKS_PER_RUN
MAX_MODEL_LEN = 131_072  # requests of more tokens are left out
TIERS = {"dram": 500_000, "nvme": 5_000_000, "lmdb": 10_000_000}


def requests_of(path: Path, num: int) -> list[NewRequest]:
    """Read a trace; its prefixes become hashes, of full blocks only."""
    return [
        NewRequest(
            f"r{idx}",
            row.arrival_seconds,
            max(1, row.num_output_tokens),
            num_prompt_tokens=row.num_prompt_tokens,
            block_hashes=[
                number.to_bytes(16, "little")
                for number in row.block_ids[: row.num_prompt_tokens // TOKENS_PER_BLOCK].tolist()
            ],
        )
        for idx, row in enumerate(load_trace(path, TOKENS_PER_BLOCK).requests[:num])
    ]


def tiers(nbytes_per_block: int, policy: str) -> Config:
    """Return the three tiers; nothing is ever made at their paths."""
    nowhere = Path(tempfile.gettempdir()) / "kvtiers-of-no-engine"
    sizes = {
        name: f"{-(-num // TOKENS_PER_BLOCK * nbytes_per_block) // 2**20}MiB"
        for name, num in TIERS.items()
    }
    below = [
        {"kind": "nvme", "paths": [str(nowhere)], "capacity": sizes["nvme"], "write": "back"},
        {"kind": "lmdb", "path": f"{nowhere}.lmdb", "capacity": sizes["lmdb"], "write": "back"},
    ]
    dram = {"kind": "dram", "capacity": sizes["dram"], "pin": "off"}
    return parse_mapping({"tiers": [dram, *below], "policy": {"evict": policy}})


def main() -> None:
    """Replay, and print what it took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=at_least(1), default=12_031)
    parser.add_argument("--policy", choices=POLICIES, default=PolicyConfig().evict)
    options = parser.parse_args()
    shape, hardware = known_model("llama-3.1-8b").shape, known_hardware("h100")
    stores = {"nvme": known_storage("nvme-gen5"), "lmdb": known_storage("nvme-gen4")}
    machine = ModelledMachine.of(shape, hardware, stores)
    pool = EngineMemory(shape, hardware, runtime_nbytes=4 * 10**9).pool
    settings = EngineSettings(
        pool.num_blocks, max_model_len=MAX_MODEL_LEN, blocks_per_hash=BLOCKS_PER_RUN
    )
    try:
        asked = requests_of(options.trace, options.requests)
    except KVTiersError as error:
        parser.error(str(error))
    requests = [it for it in asked if it.num_prompt_tokens + it.max_tokens <= MAX_MODEL_LEN]
    nbytes_per_block = BLOCKS_PER_RUN * (16 * pool.kv_nbytes_per_token + 4096)
    engine = modelled_engine(settings, machine, tiers(nbytes_per_block, options.policy))
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
        f"{options.policy}: {len(served)} requests ({len(asked) - len(requests)} are too long), "
        f"{num_steps} steps, {engine.now:.0f} s of traffic: {seconds:.1f} s of CPU, {mib:.0f} MiB; "
        f"of {prompt / 1e6:.1f}M prompt tokens {local / 1e6:.1f}M were in HBM and "
        f"{reloaded / 1e6:.1f}M were reloaded"
    )


if __name__ == "__main__":
    main()
