"""Random orders, turns and faults against an oracle that knows which bytes are where."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from ranks import OK, assert_at_rest

from kvtiers.data.copier import Direction
from kvtiers.data.memory_store import MemoryStore
from kvtiers.data.portions import Portions
from kvtiers.data.runs import Unread
from kvtiers.model.frame import FrameFormat
from kvtiers.model.keys import group_of
from kvtiers.model.messages import DRAM, HBM, NO_SLOT, RELEASED, JobId, Transfer, TransferKind
from kvtiers.model.outcome import Outcome
from kvtiers.testing.fake_device import make_layout
from kvtiers.testing.fake_rank import FakeRank, key_of
from kvtiers.testing.faults import FaultyStore, Flip, HeldStore
from kvtiers.testing.pattern import block_pattern, recognise

NUM_BLOCKS, NUM_SLOTS = 10, 10
POOL = [key_of(number, group) for number in range(6) for group in range(2)]

choices = st.lists(
    st.tuples(st.sampled_from(POOL), st.integers(0, 2), st.booleans()),
    min_size=1,
    max_size=4,
    unique_by=lambda row: row[0],
)


class ExecutorMachine(RuleBasedStateMachine):
    """Plays control and engine: it orders only what its own books allow.

    What the machine guarantees, as control does: no slot or engine block of a running job is
    ordered for another, but that a reload may read what an offload is bringing, and that a block is
    the engine's again once a fence says that it was read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rank = FakeRank(
            make_layout(NUM_BLOCKS, [[64, 32], [100]]),
            NUM_SLOTS,
            lambda slab: {
                "m": FaultyStore(MemoryStore(slab, 60_000), slab),
                "n": HeldStore(MemoryStore(slab, 2**24)),
            },
            piece_nbytes=150,
            portions=Portions(2),
            verify_dram=True,
        )
        self.epoch = 0
        self.seen = 0
        self.orders: dict[JobId, Transfer] = {}
        self.open: set[JobId] = set()
        self.busy_slots: dict[JobId, set[int]] = {}
        self.busy_blocks: dict[JobId, set[int]] = {}
        self.landing: dict[int, bytes] = {}  # slot -> key that a running offload brings
        self.fences: list[tuple[Unread, JobId, list[int]]] = []

    # -- orders -----------------------------------------------------------------------

    @rule(rows=choices, into=st.integers(0, 3), deadline=st.sampled_from([1.0, 1e9]))
    def offload(self, rows, into, deadline):
        blocks, slots = self._free_blocks(), self._free_slots()
        keys = [key for key, _, _ in rows][: min(len(blocks), len(slots))]
        for key, block in zip(keys, blocks, strict=False):
            self.rank.device.compute(block, key, int.from_bytes(key[-4:], "big"))
        order = self.rank.orders.offload(
            keys,
            blocks[: len(keys)],
            slots[: len(keys)],
            into,
            deadline=deadline,
            epoch=self.epoch,
        )
        self._submit(order)
        self.landing.update(zip(slots, keys, strict=False))

    @rule(rows=choices, deadline=st.sampled_from([1.0, 1e9]), window=st.integers(0, 2))
    def reload(self, rows, deadline, window):
        blocks, free = self._free_blocks(), self._free_slots()
        rows = rows[: len(blocks)]
        staging = [free.pop() for _ in range(min(window, len(free)))]
        own = {key: free.pop() for key, source, kept in rows if source and kept and free}
        taken = {*staging, *own.values()}
        slots = [
            own.get(key, NO_SLOT) if source else self._source(key, taken) for key, source, _ in rows
        ]
        sources = [source for _, source, _ in rows]
        order = self.rank.orders.reload(
            [key for key, _, _ in rows],
            blocks[: len(rows)],
            slots,
            sources,
            window=staging,
            deadline=deadline,
            epoch=self.epoch,
        )
        self._submit(order)

    @rule(slot_idx=st.integers(0, 3), key=st.sampled_from(POOL), into=st.integers(1, 3))
    def demote(self, slot_idx, key, into):
        """Of a slot at rest; of a key that it may not hold."""
        slots = self._free_slots()
        if slots:
            slot = slots[slot_idx % len(slots)]
            self._submit(self.rank.orders.demote([key], [slot], into, epoch=self.epoch))

    @rule(rows=choices, deadline=st.sampled_from([1.0, 1e9]), window=st.integers(0, 1))
    def promote(self, rows, deadline, window):
        """Into slots of their own, which reloads may read from at once; the rest is dropped."""
        free = self._free_slots()
        staging = [free.pop() for _ in range(min(window, len(free)))]
        own = {key: free.pop() for key, _, kept in rows if kept and free}
        order = self.rank.orders.promote(
            [key for key, _, _ in rows],
            [own.get(key, NO_SLOT) for key, _, _ in rows],
            [max(source, 1) for _, source, _ in rows],
            window=staging,
            deadline=deadline,
            epoch=self.epoch,
        )
        self._submit(order)
        self.landing.update({slot: key for key, slot in own.items()})

    @rule()
    def enter_epoch(self):
        self.epoch += 1
        self.rank.executor.enter(self.epoch, self.epoch)

    @rule(data=st.data())
    def give_up(self, data):
        offloads = [j for j in self.open if self.orders[j].kind is TransferKind.OFFLOAD]
        if offloads:
            job = data.draw(st.sampled_from(sorted(offloads)))
            self.rank.executor.give_up({job})

    @rule(data=st.data())
    def fence(self, data):
        unread = sorted(job for job in self.open if self.busy_blocks.get(job))
        offloads = [job for job in unread if self.orders[job].kind is TransferKind.OFFLOAD]
        if offloads:
            job = data.draw(st.sampled_from(offloads))
            blocks = data.draw(st.sets(st.sampled_from(sorted(self.busy_blocks[job])), min_size=1))
            fence = self.rank.executor.fence({job: sorted(blocks)})
            self.fences.append((fence, job, sorted(blocks)))

    # -- faults -----------------------------------------------------------------------

    @rule(fault=st.sampled_from([OSError("EIO"), ValueError("bug"), Outcome.FULL, Outcome.FAILED]))
    def spoil_put(self, fault):
        self.rank.stores["m"].fail("put", fault)

    @rule(
        fault=st.sampled_from(
            [OSError("EIO"), ValueError("bug"), OK, Outcome.MISSING, Flip(30), Flip(4096)]
        )
    )
    def spoil_get(self, fault):
        self.rank.stores["m"].fail("get", fault)

    @rule(when=st.booleans())
    def spoil_copy(self, when):
        (self.rank.device.fail_copy if when else self.rank.device.fail_submit)(OSError("bus"))

    @rule()
    def fail_all(self):
        self.advance(1)  # what was submitted is taken in, epochs before all
        self.rank.executor.fail_all()
        self._collect()

    # -- turns ------------------------------------------------------------------------

    @rule(num=st.integers(1, 4))
    def advance(self, num):
        self.rank.advance(num)
        self._collect()

    @rule(num=st.integers(1, 3))
    def work(self, num):
        self.rank.device.work(num)

    @rule(direction=st.sampled_from(Direction))
    def copy(self, direction):
        self.rank.device.step(direction)

    @rule(newest_first=st.booleans())
    def release(self, newest_first):
        self.rank.stores["n"].release(1, newest_first=newest_first)

    @rule(seconds=st.sampled_from([0.4, 1.0]))
    def wait(self, seconds):
        self.rank.clock.advance(seconds)

    @rule()
    @precondition(lambda self: self.open)
    def rest(self):
        """Let everything happen; then nothing is left over."""
        for _ in range(20):
            self.rank.settle()
            self.rank.stores["n"].release()
            self._collect()
        self.rank.clock.advance(2e9)  # jobs without a window wait for their deadline
        self.rank.settle()
        self._collect()
        assert not self.open
        assert_at_rest(self.rank)

    @invariant()
    def no_block_is_waited_for_that_is_settled(self):
        unread = set().union(*(fence.jobs for fence, _, _ in self.fences))
        assert unread | self.rank.executor.unloaded(self.orders) <= self.open

    @invariant()
    def what_a_fence_lets_go_of_is_overwritten_at_once(self):
        waiting, self.fences = self.fences, []
        for fence, job, blocks in waiting:
            if fence.jobs:
                self.fences.append((fence, job, blocks))
                continue
            mine = self.busy_blocks.get(job, set())
            for block in mine.intersection(blocks):
                for group in range(2):
                    self.rank.device.overwrite(group, block, np.full(100, 0xEE, np.uint8))
                mine.remove(block)

    def teardown(self):
        self.rest()
        self.rank.close()

    # -- books ------------------------------------------------------------------------

    def _free_slots(self):
        busy = set().union(*self.busy_slots.values())
        return [slot for slot in range(NUM_SLOTS) if slot not in busy]

    def _free_blocks(self):
        busy = set().union(*self.busy_blocks.values())
        return [block for block in range(NUM_BLOCKS) if block not in busy]

    def _source(self, key, taken):
        """Return the slot to reload a key from: the right one if there is one."""
        right = [slot for slot, content in self.landing.items() if content == key]
        candidates = [slot for slot in [*right, *self._free_slots()] if slot not in taken]
        return candidates[0] if candidates else NO_SLOT

    def _submit(self, order):
        self.orders[order.job_id] = order
        self.open.add(order.job_id)
        slots = {slot for slot in (*order.slots.tolist(), *order.window.tolist()) if slot >= 0}
        self.busy_slots[order.job_id] = slots
        for slot in slots - set(order.slots[order.sources == 0].tolist()):
            self.landing.pop(slot, None)
        if order.kind in (TransferKind.OFFLOAD, TransferKind.RELOAD):
            self.busy_blocks[order.job_id] = set(order.block_ids.tolist())
        self.rank.submit(order)

    def _collect(self):
        self.rank.answers += self.rank.executor.poll()
        for completion in self.rank.answers[self.seen :]:
            order = self.orders[completion.job_id]
            assert completion.job_id in self.open, "answered after its last answer"
            assert len(completion.outcomes) == order.num_blocks
            if completion.hop in (HBM, DRAM):
                self._check(order, completion)
                self.busy_blocks.pop(completion.job_id, None)
            if completion.hop == RELEASED:
                assert completion.last
            if completion.last:
                self.open.remove(completion.job_id)
                del self.busy_slots[completion.job_id]
        self.seen = len(self.rank.answers)

    def _check(self, order, completion):
        """A block that is called right has its bytes, at the moment it is called right."""
        for row, outcome in enumerate(completion.outcomes.tolist()):
            key = order.block_keys()[row]
            if completion.hop == HBM and outcome == OK:
                assert self.rank.holds(int(order.block_ids[row]), key)
            slot = int(order.slots[row])
            if order.kind is TransferKind.OFFLOAD and outcome == OK:
                self._check_payload(slot, key)
            if order.kind is TransferKind.PROMOTE and outcome == OK and slot != NO_SLOT:
                self._check_frame(slot, key)
        loads = order.kind in (TransferKind.RELOAD, TransferKind.PROMOTE)
        if loads and completion.epoch < self.epoch:
            assert set(completion.outcomes.tolist()) <= {Outcome.STALE}

    def _check_payload(self, slot, key):
        group = self.rank.layout.groups[group_of(key)]
        start = FrameFormat.of(group).header_nbytes
        found = self.rank.slab.view(slot)[start : start + group.payload_nbytes]
        assert bytes(found) == block_pattern(key, group).tobytes()

    def _check_frame(self, slot, key):
        fault = FrameFormat.of(self.rank.layout.groups[group_of(key)]).fault
        assert fault(self.rank.slab.view(slot), self.rank.name(key)) is None


TestExecutor = ExecutorMachine.TestCase
TestExecutor.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


def test_oracle_tells_blocks_apart():
    layout = make_layout(4, [[64, 32]])
    rank = FakeRank(layout)
    rank.fill([1], POOL[:1])
    assert recognise(rank.payload(1), POOL, layout.groups[0]) == POOL[0]
    assert recognise(rank.payload(2), POOL, layout.groups[0]) is None
