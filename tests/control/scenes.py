"""A controller with simulated ranks, for stories told in a few lines."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvtiers.control.answers import LoadDone
from kvtiers.control.reload import LoadRequest
from kvtiers.control.settings import ControlSettings, GroupSettings, StoreSettings
from kvtiers.model.keys import BlockKey, Rank, block_key
from kvtiers.model.messages import NO_BLOCK, JobId, StepOrders, Transfer
from kvtiers.testing.control_machine import make_controller
from kvtiers.testing.invariants import check_controller
from kvtiers.testing.sim_rank import Faults, SimRank, SimStore

BLOCK_SIZE = 4
DISK = StoreSettings("disk", 64)
SHARED = StoreSettings("shared", None)


def chain(name: str, num_blocks: int, group: int = 0) -> list[BlockKey]:
    """The keys of a document's blocks."""
    return [block_key(f"{name}{i}".encode().ljust(32, b"."), group) for i in range(num_blocks)]


def dram(num_slots: int, *stores: StoreSettings, **more: object) -> ControlSettings:
    return ControlSettings(num_slots, BLOCK_SIZE, 1000, stores=stores, **more)


def windowed(num_slots: int, *windows: int | None) -> ControlSettings:
    groups = tuple(GroupSettings(window) for window in windows)
    return ControlSettings(num_slots, BLOCK_SIZE, 1000, groups=groups)


class Scene:
    """One engine; `now` is its time."""

    def __init__(self, settings: ControlSettings, num_ranks: int = 1) -> None:
        self.settings = settings
        self.controller = make_controller(settings, num_ranks)
        self.shared = SimStore()
        self.ranks = [
            SimRank(
                Rank(i),
                settings.num_slots,
                {
                    s.name: SimStore(s.capacity_blocks) if s.capacity_blocks else self.shared
                    for s in settings.stores
                },
            )
            for i in range(num_ranks)
        ]
        self.now = 0.0
        self.loads: list[LoadDone] = []
        self._blocks = itertools.count(100)

    # -- the engine -------------------------------------------------------------------

    def offload(self, *groups: list[BlockKey], settle: bool = True) -> int:
        """Compute a chain and offer it; returns how many leading blocks were taken."""
        taken = []
        for keys in groups:
            block_ids = [next(self._blocks) for _ in keys]
            for rank in self.ranks:
                rank.compute(block_ids, keys)
            taken.append(self.controller.computed(keys, block_ids, 0, len(keys)))
        if settle:
            self.settle()
        return min(taken)

    def hits(self, *groups: list[BlockKey], request: str = "a", start: int = 0) -> int | None:
        """Ask how many blocks of a prompt that is one token longer can be reloaded."""
        num_tokens = len(groups[0]) * BLOCK_SIZE + 1
        return self.controller.plan(request, groups, start, num_tokens, self.now).num_blocks

    def load(
        self,
        *groups: list[BlockKey],
        num_blocks: int | None = None,
        request: str = "a",
        start: int = 0,
        in_step: bool = False,
    ) -> JobId:
        """Let the engine make room for blocks and start their load."""
        num = len(groups[0]) - start if num_blocks is None else num_blocks
        first = [g.first_needed(start + num, BLOCK_SIZE) for g in self.settings.groups]
        block_ids = [
            [NO_BLOCK if i < skip else next(self._blocks) for i in range(start + num)]
            for skip in first
        ]
        return self.controller.allocated(
            LoadRequest(request, groups, block_ids, start, num, in_step), self.now
        )

    # -- the ranks --------------------------------------------------------------------

    def step(self) -> StepOrders:
        """Hand a step's orders to the ranks; nobody answers yet."""
        orders = self.controller.take_orders(0, (), self.now)
        for rank in self.ranks:
            for completion in rank.take(orders):
                self.controller.completed(completion, self.now)
        check_controller(self.controller)
        return orders

    def answer(
        self, job_id: JobId, faults: Faults | None = None, rank: int | None = None
    ) -> LoadDone | None:
        """Let one rank, or all, answer the next hop of a job."""
        done = None
        for each in self.ranks if rank is None else [self.ranks[rank]]:
            done = self.controller.completed(each.answer(job_id, faults), self.now) or done
            check_controller(self.controller)
        return done

    def settle(self) -> list[LoadDone]:
        """Step until every rank has answered everything; returns the loads that ended."""
        loads: list[LoadDone] = []
        for _ in range(50):
            self.step()
            for rank in self.ranks:
                for job_id in rank.answerable():
                    done = self.controller.completed(rank.answer(job_id), self.now)
                    loads += [done] if done else []
            check_controller(self.controller)
            if not self.controller.busy:
                return loads
        raise AssertionError("the ranks never come to rest")


def reloads(orders: StepOrders) -> list[Transfer]:
    return [transfer for transfer in orders.before if transfer.request_id]


def resident(scene: Scene, keys: Sequence[BlockKey]) -> list[int]:
    """Which blocks of a chain DRAM serves."""
    return [i for i, key in enumerate(keys) if scene.controller.dram.get(key) is not None]
