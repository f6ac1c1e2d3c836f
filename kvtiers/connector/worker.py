"""The engine-neutral interface, on the worker's side."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvtiers.data.copier import Marker
from kvtiers.data.executor_thread import ExecutorThread
from kvtiers.model.errors import ProtocolError, TransferError
from kvtiers.model.messages import (
    DRAM,
    HBM,
    Completion,
    Forget,
    Hello,
    JobId,
    StepOrders,
    Transfer,
    TransferKind,
    WorkerReport,
)
from kvtiers.model.outcome import Outcome

logger = logging.getLogger(__name__)

FENCE_SECONDS = 5.0  # then what was not read is dropped: the engine does not wait for a cache
ALL_GROUPS: Final = 2**31 - 1
IDLE_WAIT_SECONDS = 0.002  # an idle engine may wait for a load instead of spinning


@dataclass(frozen=True, slots=True)
class Loaded:
    """Reloads that this rank has settled.

    Attributes:
        request_ids: whose asynchronous reload is over, well or badly, each exactly once.
        failed_requests: those of them with a failed block.
        failed_blocks: engine blocks that must be computed, of all reloads.
    """

    request_ids: frozenset[str] = frozenset()
    failed_requests: frozenset[str] = frozenset()
    failed_blocks: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Pending:
    """Reloads by job, and what has been learnt since the last `take_loaded`."""

    transfers: dict[JobId, Transfer] = field(default_factory=dict)
    request_ids: set[str] = field(default_factory=set)
    failed_requests: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)


class WorkerConnector:
    """One per rank; every method is called on the worker's own thread.

    The order in a step: `begin_step`, `load_in_step`, the forward pass, `end_step`,
    `take_loaded`, `take_report`. An engine whose KV groups are ranges of layers may call
    `load_in_step` within the forward pass instead, before the first layer of each range; one that
    drafts tokens after the forward pass may take loads and report before `end_step`.
    """

    def __init__(
        self, hello: Hello, executor: ExecutorThread, mark: Callable[[], Marker | None]
    ) -> None:
        self.hello = hello
        self._executor = executor
        self._mark = mark
        self._step = 0
        self._orders: StepOrders | None = None
        self._pending = _Pending()
        self._reloads: list[Transfer] = []  # of the step, not begun
        self._sync: set[JobId] = set()
        self._sync_failed = False
        self._last_loaded = ALL_GROUPS  # KV group up to which the engine comes after its reloads
        self._completions: list[Completion] = []
        self._counters: dict[str, int] = {}

    def begin_step(self, orders: StepOrders, *, load: bool = True) -> None:
        """Take the step's orders in, once, before the forward pass.

        Whatever this step overwrites has been read when this returns. An order that is
        malformed comes back FAILED: a cache that errs costs time, never the engine.

        Args:
            load: whether reloads begin. An engine that clears new blocks between this and the
                forward pass says no, and comes again once that is queued.

        Raises:
            ProtocolError: the forward pass needs a reload that was never ordered; computing on
                its blocks would give wrong tokens.
        """
        if orders.step > self._step:
            self._begin(orders)
        if load:
            self._begin_loads()

    def _begin(self, orders: StepOrders) -> None:
        self._step = orders.step
        self._orders = orders
        self._sync = set(orders.sync_loads)
        self._sync_failed = False
        self._executor.enter(orders.epoch, orders.generation)
        for forget in orders.forgets:
            self._forget(forget)
        marker = self._mark()
        for transfer in orders.before:
            if transfer.kind is not TransferKind.RELOAD:
                self._submit(transfer, marker)
        if orders.fences and not self._executor.wait_read(orders.fences, FENCE_SECONDS):
            logger.warning("offloads %s were not read in time and dropped", [*orders.fences])
            self._count("fences_missed")
        self._reloads = [t for t in orders.before if t.kind is TransferKind.RELOAD]
        self._pending.transfers.update((transfer.job_id, transfer) for transfer in self._reloads)
        self._check_sync()
        self._last_loaded = -1 if self._sync else ALL_GROUPS

    def _begin_loads(self) -> None:
        """Begin the step's reloads, once, behind all that the engine has queued by now."""
        reloads, self._reloads = self._reloads, []
        marker = self._mark() if reloads else None
        for transfer in reloads:
            self._submit(transfer, marker)
        if self._sync:
            self._executor.need(self._sync)

    def load_in_step(self, group: int = ALL_GROUPS) -> None:
        """Order the coming forward pass behind the reloads that it reads, as far as it reads now.

        Where the engine's device can wait for a copy, the host waits only until it is queued. What
        became of it is known in `end_step` and `take_loaded`.

        Args:
            group: the last KV group that is read next; those before it are waited for too.

        Raises:
            ProtocolError: the executor has stopped; computing would give wrong tokens.
        """
        if group <= self._last_loaded:
            return
        self._begin_loads()
        if not self._executor.hold_engine(self._sync, group):
            raise ProtocolError(f"the executor stopped before KV group {group} was loaded")
        self._last_loaded = group

    def _settle_sync(self) -> None:
        """Wait for the step's reloads, and learn how they ended."""
        if not self._sync:
            return
        self._executor.wait_loaded(self._sync, None)
        self._collect()
        unsettled = sorted(self._sync.intersection(self._pending.transfers))
        if unsettled:
            raise ProtocolError(f"the executor stopped before it had settled reloads {unsettled}")

    def end_step(self) -> None:
        """Offload what the forward pass filled; it has been queued on the engine's device.

        Raises:
            ProtocolError: as `load_in_step`.
        """
        orders, self._orders = self._orders, None
        if orders is None:
            return
        self._begin_loads()
        self._settle_sync()  # before anything that was computed on them is believed
        marker = self._mark()
        for transfer in orders.after:
            if self._sync_failed:
                self._refuse(transfer)  # computed on top of blocks that never came
            else:
                self._submit(transfer, marker)
        if not orders.num_scheduled_tokens and self._pending.transfers:
            self._executor.wait_loaded(self._pending.transfers, IDLE_WAIT_SECONDS)
        elif not orders.num_scheduled_tokens:
            self._executor.wait_idle(IDLE_WAIT_SECONDS)

    def take_loaded(self) -> Loaded:
        """Return the reloads that were settled since the last call, with those of this step.

        Raises:
            ProtocolError: as `load_in_step`.
        """
        self._settle_sync()  # vLLM asks before `end_step` where it guesses tokens
        self._collect()
        pending = self._pending
        loaded = Loaded(
            frozenset(pending.request_ids),
            frozenset(pending.failed_requests),
            frozenset(pending.failed_blocks),
        )
        self._pending = _Pending(transfers=pending.transfers)
        return loaded

    def take_report(self) -> WorkerReport | None:
        """Return the answers for control since the last call, None when there are none."""
        self._collect()
        links = self._executor.take_links()
        if not self._completions and not links and not self._counters:
            return None
        report = WorkerReport(tuple(self._completions), links, self._counters)
        self._completions, self._counters = [], {}
        return report

    def close(self) -> None:
        """Stop the executor and release all memory; idempotent."""
        self._executor.close()

    # -- internals --------------------------------------------------------------------

    def _submit(self, transfer: Transfer, marker: Marker | None) -> None:
        try:
            self._executor.submit(transfer, marker)
        except TransferError as error:
            logger.error("order refused: %s", error)
            self._count("orders_refused")
            self._refuse(transfer)

    def _forget(self, forget: Forget) -> None:
        try:
            self._executor.forget(forget)
        except TransferError as error:
            logger.error("order refused: %s", error)
            self._count("orders_refused")

    def _check_sync(self) -> None:
        """Refuse a forward pass that reads blocks which no reload brings."""
        known = {transfer.job_id for transfer in (self._orders.before if self._orders else ())}
        unknown = self._sync - known - self._pending.transfers.keys()
        if unknown:
            raise ProtocolError(
                f"step {self._step} needs reloads {sorted(unknown)}, which were not ordered"
            )

    def _collect(self) -> None:
        for completion in self._executor.poll():
            self._answer(completion)

    def _answer(self, completion: Completion) -> None:
        self._completions.append(completion)
        if completion.hop == HBM:
            self._settle(completion)

    def _settle(self, completion: Completion) -> None:
        transfer = self._pending.transfers.pop(completion.job_id, None)
        if transfer is None:
            return
        failed = np.flatnonzero(completion.outcomes != Outcome.OK)
        synchronous = completion.job_id in self._sync
        if not synchronous:
            self._pending.request_ids.add(transfer.request_id)
        if not len(failed):
            return
        self._pending.failed_blocks.update(transfer.block_ids[failed].tolist())
        if synchronous:
            self._sync_failed = True
        else:
            self._pending.failed_requests.add(transfer.request_id)
        worst = Outcome(int(completion.outcomes[failed].max()))
        logger.warning(
            "request %s: %d of %d blocks were not reloaded (%s); they are computed instead",
            transfer.request_id,
            len(failed),
            transfer.num_blocks,
            worst.name,
        )

    def _refuse(self, transfer: Transfer) -> None:
        """Answer an order without running it."""
        outcomes = np.full(transfer.num_blocks, Outcome.FAILED, np.uint8)
        hops = _hops(transfer)
        for hop in hops:
            self._answer(
                Completion(
                    transfer.job_id, transfer.epoch, self.hello.rank, hop, outcomes, hop == hops[-1]
                )
            )

    def _count(self, name: str) -> None:
        self._counters[name] = self._counters.get(name, 0) + 1


def _hops(transfer: Transfer) -> list[str]:
    """Return the hops that an order is answered for, in their order."""
    if transfer.kind is TransferKind.RELOAD:
        return [HBM]
    first = [DRAM] if transfer.kind in (TransferKind.OFFLOAD, TransferKind.PROMOTE) else []
    return first + [
        name
        for idx, name in enumerate(transfer.stores)
        if ((transfer.targets >> idx) & 1 == 1).any()
    ]
