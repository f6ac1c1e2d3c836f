"""The engine that `decide` measures: vLLM on the CPU, over one store as slow as one wants."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvtiers.bench.random_model import RandomModel, write_random_model
from kvtiers.control.tier import Residence
from kvtiers.model.cost_mode import CostMode

MODEL = RandomModel(
    num_layers=6,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    intermediate_size=1408,
    vocab_size=512,
    max_position_embeddings=8192,
    dtype="bfloat16",
)
BLOCK_SIZE, LONGEST = 32, 2049
NUM_DOCUMENTS = 8
FITTED = (257, 513, 1025, 1537)  # lengths of prompts that teach


@dataclass(frozen=True)
class Setup:
    """What is run: the model, the tokens of a step, and ranges of layers that load apart."""

    model: RandomModel = MODEL
    step_tokens: int = 1024
    num_ranges: int = 1


PLAIN = Setup()
LAYERED = Setup(replace(MODEL, num_layers=12), 2048, 12)  # all that is computed fits in a step


@dataclass(frozen=True)
class Shot:
    """Requests that came at once: times to their first tokens, and what was predicted."""

    ttft_seconds: float
    predicted_seconds: float | None
    num_loaded: int
    num_failed: int
    load_seconds: float | None
    predicted_load_seconds: float | None


class Engine:
    """One engine with one store, whose bandwidth and mode of deciding can be set."""

    def __init__(self, folder: Path, setup: Setup) -> None:
        from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - takes seconds
        from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415

        self.setup = setup
        self.throttle = throttle_memory_stores()
        config = {
            "tiers": [
                {"kind": "dram", "capacity": "160MiB"},
                {"kind": "memory", "capacity": "1GiB"},
            ],
            # No queue, and one way for all loads. Loading everything from a slow store takes longer
            # than the default's 10 s, and would switch it off for a while, for all.
            "reload": {"prefetch": "off", "sync_below": "0ms", "deadline": "60s"}
            | {"layer_ranges": setup.num_ranges},
        }
        args = EngineArgs(
            model=str(write_random_model(setup.model, folder)),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype=MODEL.dtype,
            block_size=BLOCK_SIZE,
            max_model_len=LONGEST + BLOCK_SIZE,
            max_num_batched_tokens=setup.step_tokens,
            num_gpu_blocks_override=(NUM_DOCUMENTS + 1) * (LONGEST // BLOCK_SIZE + 2),
            max_num_seqs=NUM_DOCUMENTS,
            disable_log_stats=True,
            seed=0,
            kv_transfer_config={
                "kv_connector": "KVTiersConnector",
                "kv_connector_module_path": "kvtiers.engines.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"config": config},
            },
        )
        self._engine = LLMEngine.from_engine_args(args, enable_multiprocessing=False)
        rng = np.random.default_rng(0)
        self._documents = rng.integers(0, MODEL.vocab_size, (NUM_DOCUMENTS, LONGEST)).tolist()
        self._ids = itertools.count()
        for document in range(NUM_DOCUMENTS):
            self.shoot(LONGEST, CostMode.NEVER, [document])

    @property
    def connector(self) -> Any:
        """The engine-neutral connector."""
        return self._engine.engine_core.engine_core.scheduler.connector.scheduler_side.connector

    def set_bandwidth(self, bytes_per_second: float) -> None:
        """Make the store so fast, and let kvtiers see it by loads of other lengths."""
        self.throttle(bytes_per_second)
        for num_tokens in FITTED:
            self.shoot(num_tokens, CostMode.ALWAYS, [0])

    def shoot(
        self, num_tokens: int, mode: CostMode, documents: Sequence[int], *, settle: bool = True
    ) -> Shot:
        """Ask for the first tokens of some documents at once, which only the store has.

        Args:
            settle: wait for what the store still does for them.
        """
        from vllm import SamplingParams  # noqa: PLC0415

        self._forget()
        num_before = len(self.connector.decisions.finished())
        cost = self.connector.controller.cost
        cost.policy = replace(cost.policy, mode=mode)
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        ids = [f"{mode}-{next(self._ids)}" for _ in documents]
        started = time.perf_counter()
        for request_id, document in zip(ids, documents, strict=True):
            prompt = {"prompt_token_ids": self._documents[document][:num_tokens]}
            self._engine.add_request(request_id, prompt, params)
        first: dict[str, float] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                first.setdefault(output.request_id, time.perf_counter() - started)
        while settle and self.connector.busy:
            self._engine.step()
        decisions = self.connector.decisions.finished()[num_before:]
        outcomes = [decision.outcome for decision in decisions]
        alone = decisions[0] if len(documents) == 1 and decisions else None
        return Shot(
            statistics.fmean(first.values()),
            None if alone is None else alone.predicted_seconds["chosen"],
            sum(outcome.num_loaded_blocks for outcome in outcomes),
            sum(outcome.num_failed_blocks for outcome in outcomes),
            None if alone is None else alone.outcome.measured_seconds,
            None if alone is None else alone.predicted_seconds["load"],
        )

    def _forget(self) -> None:
        """Leave all blocks to the store."""
        while not self._engine.reset_prefix_cache(False, False):
            self._engine.step()
        dram = self.connector.controller.dram
        for entry in [e for e in dram.entries() if e.residence is Residence.READY]:
            dram.doom(entry)


def throttle_memory_stores() -> Any:
    """Put a throttle on every memory store of engines to come; returns what sets it."""
    import kvtiers.connector.stores as stores  # noqa: PLC0415 - the module is changed
    from kvtiers.data.memory_store import MemoryStore  # noqa: PLC0415
    from kvtiers.testing.faults import ThrottledStore  # noqa: PLC0415

    made: list[ThrottledStore] = []

    def make(slab: Any, capacity_nbytes: int) -> ThrottledStore:
        made.append(ThrottledStore(MemoryStore(slab, capacity_nbytes), 1e12))
        return made[-1]

    def throttle(bytes_per_second: float) -> None:
        for store in made:
            store.bytes_per_second = bytes_per_second

    stores.MemoryStore = make  # type: ignore[misc, assignment]
    return throttle


@contextmanager
def engine_here(setup: Setup) -> Iterator[Engine]:
    with tempfile.TemporaryDirectory() as folder:
        yield Engine(Path(folder), setup)
