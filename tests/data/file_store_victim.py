"""A process that works on a file store until it is killed; takes a folder and a seed.

It prints a line once the store is open. Frame `n` always has the bytes of version 0.
"""

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
    chance = random.Random(int(sys.argv[2]))
    slab = Slab(NUM_SLOTS, SLOT_NBYTES, pin="off")
    folder = Path(sys.argv[1])
    paths = (folder / "a", folder / "b")
    delay = chance.choice((0.0, 0.005, 0.05))
    box = open_box(slab, *paths, num_slots=STORE_SLOTS, publish_seconds=delay)
    print("open", flush=True)
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
