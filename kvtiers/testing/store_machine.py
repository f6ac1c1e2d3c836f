"""Random calls on a store, compared with what a dictionary would hold."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Collection

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtiers.data.slab import Slab
from kvtiers.data.store import BlockStore, FrameRef, StoreAnswer, StoreTicket
from kvtiers.model.keys import StoreKey
from kvtiers.model.outcome import Outcome

ANSWER_SECONDS = 30.0  # no medium is slower; a store that is has lost a batch
SIZES = (4097, 8192, 10_000)

_NUMBERS = range(6)
_numbers = st.sampled_from(_NUMBERS)
_batches = st.lists(st.tuples(_numbers, st.sampled_from(SIZES)), min_size=0, max_size=4)


def store_key_of(number: int) -> StoreKey:
    """Return the name of a numbered frame."""
    return StoreKey(hashlib.blake2b(number.to_bytes(8, "big"), digest_size=32).digest())


@functools.lru_cache(maxsize=512)
def frame_bytes(number: int, nbytes: int, version: int = 0) -> bytes:
    """Return what a numbered frame holds; versions differ in every part."""
    seed = hashlib.blake2b(f"{number} {nbytes} {version}".encode()).digest()
    num_parts = -(-nbytes // len(seed))
    parts = [hashlib.blake2b(seed + i.to_bytes(4, "big")).digest() for i in range(num_parts)]
    return b"".join(parts)[:nbytes]


def wait_answers(
    store: BlockStore, tickets: Collection[StoreTicket]
) -> dict[StoreTicket, StoreAnswer]:
    """Poll until batches are answered; fails on an answer that nobody asked for, or none."""
    wanted, found = set(tickets), dict[StoreTicket, StoreAnswer]()
    deadline = time.monotonic() + ANSWER_SECONDS
    while wanted - found.keys():
        for answer in store.poll():
            assert answer.ticket in wanted, f"ticket {answer.ticket} was never submitted"
            assert answer.ticket not in found, f"ticket {answer.ticket} was answered twice"
            found[answer.ticket] = answer
        assert time.monotonic() < deadline, f"no answer to {wanted - found.keys()}"
    return found


class StoreMachine(RuleBasedStateMachine):
    """Puts, gets and deletions, several batches at a time; settled before it looks.

    Args:
        says_held: whether the store must say of each frame that it held.
    """

    def __init__(
        self, store: BlockStore, slab: Slab, capacity_nbytes: int, *, says_held: bool = False
    ) -> None:
        super().__init__()
        self.store = store
        self.says_held = says_held
        self.slab = slab
        self.capacity_nbytes = capacity_nbytes
        self.model: dict[int, bytes] = {}
        self.retired: set[StoreKey] = set()
        self.base = 0  # of the numbers that are asked for now
        self.free = list(range(slab.num_slots))
        self.version = 0
        self.settled = True  # False where an assertion has stopped a comparison
        # In the order of submission: ("put" | "get" | "delete", what it concerned)
        self.log: list[tuple[str, StoreTicket | None, list[tuple[int, bytes, FrameRef]]]] = []

    @precondition(lambda self: len(self.free) >= 4)
    @rule(batch=_batches)
    def put(self, batch: list[tuple[int, int]]) -> None:
        """Submit frames of bytes that were never put before."""
        self.version += 1
        rows = [self._row(number, nbytes) for number, nbytes in batch]
        for _, body, frame in rows:
            self.slab.view(frame.slot)[: len(body)] = body
        ticket = self.store.put([frame for _, _, frame in rows])
        self.log.append(("put", ticket, rows))

    @precondition(lambda self: len(self.free) >= 4)
    @rule(batch=_batches)
    def get(self, batch: list[tuple[int, int]]) -> None:
        """Submit frames to bring, perhaps of the wrong size."""
        rows = [self._row(number, nbytes) for number, nbytes in batch]
        for _, _, frame in rows:
            self.slab.view(frame.slot)[:] = b"\xee" * self.slab.slot_nbytes
        ticket = self.store.get([frame for _, _, frame in rows])
        self.log.append(("get", ticket, rows))

    @rule(numbers=st.lists(_numbers, max_size=3))
    def delete(self, numbers: list[int]) -> None:
        """Delete frames, perhaps while they are written."""
        present = [self.base + number for number in numbers]
        self.store.delete([store_key_of(number) for number in present])
        rows = [(number, b"", FrameRef(store_key_of(number), 0, 0)) for number in present]
        self.log.append(("delete", None, rows))

    @rule()
    def retire(self) -> None:
        """Ask for nothing that was put so far, ever again."""
        self.settle()
        self.store.retire()
        self.retired |= {store_key_of(number) for number in self.model}
        self.model.clear()
        self.base += 1 + max(_NUMBERS)

    @rule()
    def settle(self) -> None:
        """Wait for all answers and replay the calls on the dictionary."""
        self.settled = False
        log, self.log = self.log, []
        tickets = [ticket for _, ticket, _ in log if ticket is not None]
        answers = wait_answers(self.store, tickets)
        for verb, ticket, rows in log:
            if ticket is None:
                answer = StoreAnswer(StoreTicket(0), (Outcome.OK,) * len(rows), 0.0)
            else:
                answer = answers[ticket]
                self.free += [frame.slot for _, _, frame in rows]
            assert len(answer.outcomes) == len(rows)
            assert answer.held <= set(range(len(rows)))
            for idx, (row, outcome) in enumerate(zip(rows, answer.outcomes, strict=True)):
                number, body, frame = row
                self._check_held(verb, number, outcome, held=idx in answer.held)
                getattr(self, f"_was_{verb}")(number, body, frame, outcome)
        self.settled = True

    @invariant()
    def holds_what_a_dictionary_would(self) -> None:
        """Once settled: the same keys, within the bound."""
        if not self.log:
            held = {store_key_of(number) for number in self.model}
            assert held <= set(self.store.keys()) <= held | self.retired
            assert sum(map(len, self.model.values())) <= self.capacity_nbytes

    def teardown(self) -> None:
        """Read back everything that is left, unless the store has failed already."""
        if self.settled:
            self.settle()
            self.get([(number - self.base, len(body)) for number, body in self.model.items()])
            self.settle()
            self.holds_what_a_dictionary_would()
        self.store.close()

    # -- internals --------------------------------------------------------------------

    def _row(self, number: int, nbytes: int) -> tuple[int, bytes, FrameRef]:
        number += self.base
        frame = FrameRef(store_key_of(number), self.free.pop(), nbytes)
        return number, frame_bytes(number, nbytes, self.version), frame

    def _check_held(self, verb: str, number: int, outcome: Outcome, *, held: bool) -> None:
        """Compare what is said to be held with what is, before a row takes effect."""
        if verb == "put" and outcome is Outcome.OK and number in self.model:
            assert held or not self.says_held, "a frame that was held is said to be written"
        else:
            assert not held, "a frame that was written, or is not there, is said to be held"

    def _was_put(self, number: int, body: bytes, _frame: FrameRef, outcome: Outcome) -> None:
        if number in self.model:
            assert outcome is Outcome.OK
        elif outcome is Outcome.OK:
            self.model[number] = body
        else:
            assert outcome is Outcome.FULL

    def _was_get(self, number: int, _body: bytes, frame: FrameRef, outcome: Outcome) -> None:
        view = bytes(self.slab.view(frame.slot))
        held = self.model.get(number)
        if held is None:
            assert outcome is Outcome.MISSING
        elif len(held) != frame.nbytes:
            assert outcome is Outcome.CORRUPT
        else:
            assert outcome is Outcome.OK
            assert view[: frame.nbytes] == held
            return
        assert set(view) == {0xEE}, "a frame that is not OK changed its slot"

    def _was_delete(self, number: int, _body: bytes, _frame: FrameRef, _outcome: Outcome) -> None:
        self.model.pop(number, None)
