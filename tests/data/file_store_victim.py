"""A nursery of processes that work on a file store until they are killed.

Each line it reads is a seed, "open" or "early", and a folder. It forks a child that works on the
folder, and prints the child's process, at once or when its store is open, and its exit code once
it has ended. A fork costs no import. Frame `n` always has the bytes of version 0.
"""

import os
import random
import sys
from pathlib import Path

from file_stores import open_box

from kvtiers.data.slab import Slab
from kvtiers.testing.store_machine import store_key_of
from kvtiers.testing.store_suite import NUM_SLOTS, SLOT_NBYTES

NUMBERS = 64
STORE_SLOTS = 24


def main() -> None:
    for line in sys.stdin:
        seed, moment, folder = line.split()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                work(Path(folder), random.Random(int(seed)), writer)
            finally:
                os._exit(1)  # it should have been killed
        os.close(writer)
        if moment == "open":
            os.read(reader, 1)  # nothing, if the child ended before
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        os.close(reader)


def work(folder: Path, chance: random.Random, ready: int) -> None:
    slab = Slab(NUM_SLOTS, SLOT_NBYTES, pin="off")
    paths = (folder / "a", folder / "b")
    delay = chance.choice((0.0, 0.005, 0.05))
    box = open_box(slab, *paths, num_slots=STORE_SLOTS, publish_seconds=delay)
    os.write(ready, b".")
    while True:
        chosen = chance.sample(range(NUMBERS), chance.randint(1, NUM_SLOTS))
        if chance.random() < 0.02:
            box.store.clear()
        if chance.random() < 0.7:
            victims = chance.sample(range(NUMBERS), chance.randint(1, 12))
            box.store.delete([store_key_of(number) for number in victims])
        box.put(*chosen)
        if chance.random() < 0.3:
            box.get(*chosen)


if __name__ == "__main__":
    main()
