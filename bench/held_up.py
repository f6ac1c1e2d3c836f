"""Measure how long an engine step is held up by blocks of a running offload that it overwrites.

    python bench/held_up.py --out bench/results/held_up.json

A rank begins to offload 512 blocks of 2 MiB through the host copier, as it does when a long request
ends. The next step overwrites some of these blocks at once. `held` is what `begin_step` takes; the
ratio is that to the whole offload of the same turn. Median, and quartiles.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from facts import command, processor
from options import at_least
from quiet import Quiet

from kvtiers.connector.worker import WorkerConnector
from kvtiers.data.copier_host import HostCopier
from kvtiers.data.executor import Executor
from kvtiers.data.executor_thread import ExecutorThread
from kvtiers.data.key_space import KeySpace
from kvtiers.data.slab import Slab
from kvtiers.data.workshop import Workshop
from kvtiers.model.frame import slot_nbytes_for
from kvtiers.model.keys import Rank
from kvtiers.model.messages import Hello, StepOrders, int64s
from kvtiers.testing.fake_device import make_layout
from kvtiers.testing.fake_rank import FINGERPRINT, Orders, keys_of

NUM_BLOCKS, NUM_LAYERS, PAYLOAD_NBYTES = 512, 32, 2 * 2**20
OVERWRITTEN = {
    "the first": range(1),
    "the last": range(NUM_BLOCKS - 1, NUM_BLOCKS),
    "the last 64": range(NUM_BLOCKS - 64, NUM_BLOCKS),
    "all": range(NUM_BLOCKS),
}


class Line:
    """A rank with full blocks, and everything warm."""

    def __init__(self) -> None:
        layout = make_layout(NUM_BLOCKS, [[PAYLOAD_NBYTES // NUM_LAYERS] * NUM_LAYERS])
        slab = Slab(NUM_BLOCKS, slot_nbytes_for(layout.groups), pin="off")
        self.memory = [np.ones(nbytes, np.uint8) for nbytes in layout.allocations]
        copier = HostCopier(layout, [array.ctypes.data for array in self.memory], slab)
        shop = Workshop(slab, copier, layout, KeySpace(FINGERPRINT, Rank()), {}, Rank())
        self.thread = ExecutorThread(Executor(shop))
        payload = (PAYLOAD_NBYTES,)
        hello = Hello(Rank(), FINGERPRINT, NUM_BLOCKS, slab.slot_nbytes, payload, pinned=False)
        self.worker = WorkerConnector(hello, self.thread, copier.mark)
        self.orders = Orders(itertools.count(1))
        self.keys = keys_of(*range(NUM_BLOCKS))
        self.steps = itertools.count(1)
        for _ in range(2):
            self.turn(OVERWRITTEN["all"])

    def turn(self, overwritten: Sequence[int]) -> tuple[float, float]:
        """Offload and overwrite; returns seconds that the step was held, and the offload took."""
        places = range(NUM_BLOCKS)
        order = self.orders.offload(self.keys, places, places)
        start = time.perf_counter()
        self.worker.begin_step(self._orders(before=(order,)))
        self.worker.end_step()
        began = time.perf_counter()
        fences = {order.job_id: int64s(list(overwritten))}
        self.worker.begin_step(self._orders(fences=fences))
        held = time.perf_counter() - began
        self.worker.end_step()
        if not self.thread.wait_idle(60.0):
            raise RuntimeError("the offload did not end")
        whole = time.perf_counter() - start
        self.worker.take_report()
        return held, whole

    def _orders(self, **orders: object) -> StepOrders:
        return StepOrders(next(self.steps), 0, num_scheduled_tokens=1, **orders)


def spread(values: Sequence[float], digits: int) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=at_least(2), default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    line, quiet = Line(), Quiet(0.0)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in OVERWRITTEN}
    disturbed = 0
    for _ in range(options.repeats):
        quiet.restart()
        for name, blocks in OVERWRITTEN.items():
            samples[name].append(line.turn(blocks))
        disturbed += not quiet.held()
    line.worker.close()
    table = ["| overwritten | held, ms | of the whole offload |", "|---" * 3 + "|"]
    for name, pairs in samples.items():
        held = spread([1e3 * pair[0] for pair in pairs], 1)
        share = spread([pair[0] / pair[1] for pair in pairs], 2)
        table.append(f"| {name} | {held} | {share} |")
    print("\n".join(table))
    print(f"disturbed turns: {disturbed} of {options.repeats}")
    if options.out is not None:
        facts = {
            "date": datetime.date.today().isoformat(),
            "command": command(),
            "CPU": processor(),
            "cores": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "Python": platform.python_version(),
            "disturbed turns": f"{disturbed} of {options.repeats}",
        }
        data = {"machine": facts, "samples": samples}
        options.out.write_text(json.dumps(data, indent=1) + "\n")
        lines = [f"- {name}: {value}" for name, value in facts.items()]
        text = ["# How long a step is held up", "", *__doc__.split("\n\n")[2:], *lines, "", *table]
        options.out.with_suffix(".md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
