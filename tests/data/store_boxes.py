"""File stores of sealed frames, and processes that own one: this file is also their program."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from file_stores import open_box
from lmdb_box import FORMAT, NBYTES, image, key_of

from kvtiers.data.slab import Slab
from kvtiers.data.store import FrameRef
from kvtiers.model.outcome import Outcome
from kvtiers.testing.store_suite import NUM_SLOTS, SLOT_NBYTES, Harness


class FileBox:
    """A file store whose frames are those of `lmdb_box`, with a slab of its own."""

    def __init__(self, *paths: Path, num_slots: int = 32, **settings: object) -> None:
        assert FORMAT.slot_nbytes == SLOT_NBYTES
        self.slab = Slab(NUM_SLOTS, SLOT_NBYTES, pin="off")
        box = open_box(self.slab, *paths, num_slots=num_slots, **settings)
        self.harness = Harness(box.store, self.slab)
        self.store = box.store

    def put(self, *numbers: int) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for start in range(0, len(numbers), NUM_SLOTS):
            part = numbers[start : start + NUM_SLOTS]
            for slot, number in enumerate(part):
                self.slab.view(slot)[:NBYTES] = image(number)
            outcomes += self.harness.settle(self.store.put(self._frames(part)))
        return outcomes

    def get(self, *numbers: int) -> list[Outcome]:
        """Get frames, at most a slab full; those that verify stay OK, as in the executor."""
        outcomes = self.harness.settle(self.store.get(self._frames(numbers)))
        return [
            Outcome.CORRUPT
            if outcome is Outcome.OK and FORMAT.fault(self.slab.view(slot), key_of(number))
            else outcome
            for slot, (number, outcome) in enumerate(zip(numbers, outcomes, strict=True))
        ]

    def numbers(self, most: int = 200) -> list[int]:
        """Return which frames it holds."""
        held = set(self.store.keys())
        return [number for number in range(most) if key_of(number) in held]

    def close(self) -> None:
        self.store.close()
        self.slab.close()

    def _frames(self, numbers: Sequence[int]) -> list[FrameRef]:
        return [FrameRef(key_of(number), slot, NBYTES) for slot, number in enumerate(numbers)]


def stopped_store(*paths: Path, num: int = 10, **settings: object) -> None:
    """Make a store of frames 0, 1, ..., and stop it."""
    box = FileBox(*paths, **settings)
    assert box.put(*range(num)) == [Outcome.OK] * num
    box.close()


class OwningProcess:
    """A process that owns a store and serves it as an executor does; ended by `close`."""

    def __init__(self, path: Path, num: int = 10, mode: str = "serve") -> None:
        command = [sys.executable, str(Path(__file__)), str(path), str(num), mode]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        assert self._answer() == "open"

    def __enter__(self) -> OwningProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, *numbers: int) -> list[str]:
        """Have it read frames; returns the names of the outcomes."""
        return self.tell("get", *numbers)

    def tell(self, verb: str, *numbers: int) -> list[str]:
        self._process.stdin.write(" ".join([verb, *map(str, numbers)]) + "\n")
        self._process.stdin.flush()
        return self._answer().split()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> None:
        self._process.wait(30)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.stdin.close()
            self._process.wait(30)
        self._process.stdin.close()
        self._process.stdout.close()

    def _answer(self) -> str:
        return self._process.stdout.readline().strip()


def main() -> None:
    path, num, mode = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    box = FileBox(path, publish_seconds=0.0 if mode == "churn" else 0.5)
    assert box.put(*range(num)) == [Outcome.OK] * num
    print("open", flush=True)
    turn = 0
    while True:
        readable, _, _ = select.select([0], [], [], 0.0 if mode == "churn" else 0.005)
        if readable:
            words = os.read(0, 4096).decode().split()
            if not words:
                break
            numbers = [int(word) for word in words[1:]]
            outcomes = box.get(*numbers) if words[0] == "get" else box.put(*numbers)
            print(*(outcome.name for outcome in outcomes), flush=True)
        if mode == "churn":  # frames come, stay a little, and go, in the same slots
            box.put(*(1000 + turn % 100 * 5 + i for i in range(5)))
            box.store.delete([key_of(1000 + (turn - 2) % 100 * 5 + i) for i in range(5)])
            turn += 1
        assert box.store.poll() == []
    box.close()


if __name__ == "__main__":
    main()
