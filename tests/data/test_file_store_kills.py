"""A file store whose process is killed at any moment."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from file_store_victim import NUMBERS, STORE_SLOTS
from file_stores import capacity_of, disk_usage, fills_up, open_box, settled_free

from kvtiers.model.outcome import Outcome
from kvtiers.testing.store_machine import store_key_of

OK = Outcome.OK
NUM_KILLS = 100


class Nursery:
    """Processes that work on a store."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("file_store_victim.py"))]
        self._mother = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def kill_after(self, seconds: float, folder: Path, seed: int, moment: str = "open") -> None:
        """Let one work with a seed, and kill it some time after its store is open, or it began."""
        print(seed, moment, folder, file=self._mother.stdin, flush=True)
        child = int(self._mother.stdout.readline())
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        assert int(self._mother.stdout.readline()) == -signal.SIGKILL

    def close(self) -> None:
        self._mother.communicate()


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


def check_after_kill(slab, folder):
    """Every frame that is found is whole; every slot is free or taken; usage is the bound's."""
    paths = (folder / "a", folder / "b")
    box = open_box(slab, *paths, num_slots=STORE_SLOTS)
    free = settled_free(box)
    held = [number for number in range(NUMBERS) if store_key_of(number) in box.held()]
    assert len(held) == box.store.num_slots - free
    for number in held:
        assert box.get(number) == [OK]
        assert box.slot_is(0, number), f"frame {number} has other bytes"
    assert fills_up(box, 1000) == free
    box.store.delete([store_key_of(number) for number in range(1000, 1000 + free)])
    box.store.close()
    return len(held)


def check_usage(folder):
    """What is allocated is the slots that were preallocated and no more than the capacity."""
    files = sorted(folder.glob("*/0/*/frames.slab"))
    assert [file.parents[2].name for file in files] == ["a", "b"]
    for file in files:
        assert file.stat().st_blocks * 512 >= file.stat().st_size > STORE_SLOTS // 2 * 12_288
    assert disk_usage(folder) <= capacity_of(STORE_SLOTS, 2) + 4096  # the folder above the paths


def test_killed_at_any_moment(store_slab, tmp_path, nursery):
    """No wrong byte, no lost space, and the usage never leaves the bound."""
    chance = random.Random(NUM_KILLS)
    survived = 0
    for kill in range(NUM_KILLS):
        nursery.kill_after(chance.choice((0.001, 0.02, 0.08)) * chance.random(), tmp_path, kill)
        check_usage(tmp_path)
        survived += check_after_kill(store_slab, tmp_path)
        check_usage(tmp_path)
    assert survived > NUM_KILLS  # it is not that nothing is ever kept


def test_killed_again_and_again_before_anyone_looks(store_slab, tmp_path, nursery):
    """Each process inherits what the one before left, unchecked."""
    chance = random.Random(2)
    for round_ in range(4):
        for kill in range(10):
            nursery.kill_after(0.03 * chance.random(), tmp_path, 1000 + 10 * round_ + kill)
        check_usage(tmp_path)
        check_after_kill(store_slab, tmp_path)


def test_killed_while_it_opens_for_the_first_time(store_slab, tmp_path, nursery):
    """Whatever half of a store is there, the next start makes a whole one of it."""
    chance = random.Random(3)
    num_early = 0
    for kill in range(40):
        folder = tmp_path / str(kill)
        folder.mkdir()
        nursery.kill_after(0.03 * chance.random(), folder, kill, "early")
        num_early += not list(folder.glob("b/0/*/frames.slab"))
        check_after_kill(store_slab, folder)
        check_usage(folder)
    assert num_early > 0  # it is not that all of them had opened it
