"""Runs the reference engine's steps on the reference model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import torch

from kvtiers.connector.rank import WrapStore
from kvtiers.connector.scheduler import SchedulerConnector
from kvtiers.connector.worker import Loaded, WorkerConnector
from kvtiers.engines.reference.block_pool import NULL_BLOCK
from kvtiers.engines.reference.connect import EngineFacts, connect, disconnect
from kvtiers.engines.reference.engine import Engine
from kvtiers.engines.reference.model import Chunk, ReferenceModel
from kvtiers.engines.reference.paged_kv import PagedKV
from kvtiers.engines.reference.runners import SequenceWork, StepResult, StepWork
from kvtiers.engines.reference.settings import EngineSettings
from kvtiers.model.config import Config
from kvtiers.model.errors import ConfigError
from kvtiers.model.messages import StepOrders

_IDLE_SECONDS: Final = 0.0005  # between two looks at what an idle engine waits for


def torch_engine(
    model: ReferenceModel,
    settings: EngineSettings,
    config: Config | None = None,
    wrap_store: WrapStore | None = None,
) -> Engine:
    """Return an engine that generates tokens, greedily.

    Args:
        config: the tiers below; None runs without kvtiers.
        wrap_store: see `build_host_rank`.

    Raises:
        ConfigError: a hash must name one block here, and blocks are loaded whole. CapacityError,
            StoreError: a tier cannot be had.
    """
    return Engine(settings, TorchRunner(model, settings, config, wrap_store))


class TorchRunner:
    """The model, its paged KV, and one rank of kvtiers; time is the machine's.

    Attributes:
        connector: the scheduler's side of kvtiers. worker: the copying side.
    """

    def __init__(
        self,
        model: ReferenceModel,
        settings: EngineSettings,
        config: Config | None = None,
        wrap_store: WrapStore | None = None,
    ) -> None:
        if settings.blocks_per_hash != 1:
            raise ConfigError(f"blocks_per_hash is {settings.blocks_per_hash}; real tokens need 1")
        if config is not None and config.reload.layer_ranges > 1:
            raise ConfigError(
                f"reload.layer_ranges is {config.reload.layer_ranges}; this engine loads whole "
                "blocks: write 1, or use OneRequestEngine, which loads range by range"
            )
        self.model = model
        num_blocks = settings.num_blocks + 1  # block 0 is nobody's
        self.kv = PagedKV(model.shape, num_blocks, settings.block_size, str(model.device))
        self.connector: SchedulerConnector | None = None
        self.worker: WorkerConnector | None = None
        if config is not None:
            facts = EngineFacts(settings.max_num_batched_tokens, wrap_store=wrap_store)
            self.connector, self.worker = connect(model, self.kv, config, facts)

    @property
    def now(self) -> float:
        """Seconds of the machine's monotonic clock."""
        return time.monotonic()

    def run(self, work: StepWork, orders: StepOrders | None) -> StepResult:
        """Copy what was forked, load, compute, offload."""
        for source, target in work.copies:
            for layer in self.kv.layers:
                layer[target] = layer[source]
        worker = self.worker
        if worker is not None and orders is not None:
            worker.begin_step(orders)
            worker.load_in_step()
        began = time.perf_counter()
        tokens = self._compute(work.sequences) if work.sequences else {}
        seconds = time.perf_counter() - began if work.sequences else 0.0
        if worker is None or orders is None:
            return StepResult(tokens, seconds)
        worker.end_step()
        loaded, report = worker.take_loaded(), worker.take_report()
        if not work.sequences and loaded == Loaded() and report is None:
            time.sleep(_IDLE_SECONDS)
        pure = not orders.sync_loads and not orders.fences
        return StepResult(tokens, seconds, pure, loaded, report)

    def wait_until(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(max(0.0, seconds - self.now))

    def close(self) -> None:
        """Release kvtiers' memory and stores; idempotent."""
        connector, worker = self.connector, self.worker
        self.connector = self.worker = None
        disconnect(connector, worker)

    # -- internals --------------------------------------------------------------------

    def _compute(self, sequences: Sequence[SequenceWork]) -> dict[str, list[int]]:
        """Run the model once over all sequences, and sample.

        A decode with guesses is as many chunks of one token: all write their KV before any of
        them attends, and each gives the token that follows it.
        """
        chunks: list[Chunk] = []
        firsts = []
        for work in sequences:
            assert work.token_ids is not None, f"{work.sequence_id} has no token ids"
            assert NULL_BLOCK not in work.block_ids, f"{work.sequence_id} has the null block"
            firsts.append(len(chunks))
            ids, end = work.token_ids, work.start + work.num_tokens
            known = ids[work.start : min(end, work.num_known)]
            chunks.append(Chunk(known, work.start, work.block_ids))
            for idx, guess in enumerate(_guesses(ids, end - work.num_known)):
                chunks.append(Chunk([guess], work.num_known + idx, work.block_ids))
        logits = self.model.forward(chunks, self.kv)
        best = logits.argmax(dim=-1).tolist()
        tokens = {}
        for work, first in zip(sequences, firsts, strict=True):
            if work.num_samples > 1:
                tokens[work.sequence_id] = torch.topk(
                    logits[first], work.num_samples
                ).indices.tolist()
            elif work.num_samples == 1:
                num_guesses = max(0, work.start + work.num_tokens - work.num_known)
                guesses = [chunk.token_ids[0] for chunk in chunks[first + 1 :][:num_guesses]]
                tokens[work.sequence_id] = _accepted(best[first:], guesses)
        return tokens


def _guesses(token_ids: Sequence[int], num: int) -> list[int]:
    """Return tokens that may follow: what followed the last one before, else the last again."""
    if num <= 0:
        return []
    last = token_ids[-1]
    earlier = range(len(token_ids) - 2, -1, -1)
    found = next((idx for idx in earlier if token_ids[idx] == last), None)
    guesses = [] if found is None else list(token_ids[found + 1 : found + 1 + num])
    return guesses + [last] * (num - len(guesses))


def _accepted(best: Sequence[int], guesses: Sequence[int]) -> list[int]:
    """Return the guesses that are right, and the token that follows them."""
    num = 0
    while num < len(guesses) and guesses[num] == best[num]:
        num += 1
    return list(best[: num + 1])
