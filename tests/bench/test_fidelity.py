"""The judge of fidelity: errors, spread, order, and what an engine's measurements teach."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
try:
    from fidelity_judge import Cell, Run, report, ttft, verdict
    from fidelity_taught import Taught
finally:
    del sys.path[0]


def run_of(seconds: float, rate: float = 100.0, **more: Any) -> Any:
    return Run.of([seconds] * 3, rate, **more)


def cell_of(config: str, measured: list[float], modelled: float, workload: str = "w") -> Any:
    runs = [run_of(seconds) for seconds in measured]
    return Cell(workload, config, runs, run_of(modelled))


def test_a_run_knows_its_mean_its_median_and_its_tail():
    run = Run.of([float(i) for i in range(1, 12)], 5.0)
    assert (run.ttft_seconds, run.ttft_median, run.ttft_p90) == (6.0, 6.0, 10.0)
    alone = Run.of([2.0], 5.0)
    assert (alone.ttft_seconds, alone.ttft_median, alone.ttft_p90) == (2.0, 2.0, 2.0)


def test_ten_percent_are_allowed_or_the_spread_and_a_half():
    steady = [1.0, 1.0, 1.0]
    near, far = cell_of("a", steady, 1.09), cell_of("a", steady, 1.2)
    assert verdict([near], ttft).met
    assert not verdict([far], ttft).met
    noisy = cell_of("a", [0.8, 1.0, 1.2], 1.2)
    found = verdict([noisy], ttft)
    assert found.spread == pytest.approx(0.4)
    assert found.allowed == pytest.approx(0.6)
    assert found.met


def test_the_median_error_counts_and_the_largest_is_told():
    cells = [cell_of(str(i), [1.0, 1.0], 1 + error) for i, error in enumerate((0.01, 0.05, 0.5))]
    found = verdict(cells, ttft)
    assert (found.error, found.largest) == (pytest.approx(0.05), pytest.approx(0.5))
    assert "TTFT, mean: median error 5.0%, largest 50.0%; allowed 10.0%: met" in report(cells)


def test_the_order_counts_only_where_repeats_can_tell():
    one, two = cell_of("one", [1.0, 1.0], 2.0), cell_of("two", [1.5, 1.5], 1.0)
    found = verdict([one, two], ttft)
    assert (found.num_kept, found.num_pairs) == (0, 1)
    assert found.wrong == ["w/one and w/two"]
    noisy = cell_of("two", [0.5, 1.5, 2.5], 1.0)
    assert verdict([one, noisy], ttft).num_pairs == 0


def test_configurations_are_compared_within_a_workload_unless_asked_across():
    cells = [cell_of("a", [1.0, 1.0], 1.0, "x"), cell_of("a", [2.0, 2.0], 2.0, "y")]
    assert verdict(cells, ttft).num_pairs == 0
    assert verdict(cells, ttft, across=True).num_kept == 1


def test_hits_that_differ_are_shown():
    runs = [run_of(1.0, hits={"dram": 32})] * 2
    same = Cell("w", "a", runs, run_of(1.0, hits={"dram": 32}))
    other = Cell("w", "a", runs, run_of(1.0, hits={"dram": 16}))
    assert "dram 32, equal" in report([same])
    assert "dram 16; measured dram 32" in report([other])


def test_hand_over_is_what_steps_with_reloads_take_longer():
    usual = [(0, 5, 0.001)] * 5 + [(0, 0, 9.0)]  # a step without tokens waits, and says nothing
    taught = Taught(schedules=[*usual, (1, 0, 0.003), (2, 4, 0.005)], notices=[0.002, 0.004])
    over = taught.hand_over()
    assert over.plan_seconds == pytest.approx(0.002)
    assert over.idle_seconds == pytest.approx(0.001)
    assert over.notice_seconds == pytest.approx(0.003)
    assert Taught(schedules=usual).hand_over().plan_seconds == 0.0


def test_what_is_judged_does_not_teach():
    taught = Taught(steps=[([1], [0], 0.1)], links=[("a", 1, 1, 0.1)])
    sizes = taught.sizes()
    taught.steps.append(([2], [0], 0.2))
    taught.schedules.append((0, 2, 0.1))
    taught.cut(sizes)
    assert taught == Taught(steps=[([1], [0], 0.1)], links=[("a", 1, 1, 0.1)])


def test_links_are_learnt_from_their_jobs():
    jobs = [("nvme>dram", num, 0, 0.0005 + num * 0.0001) for num in (1, 4, 16, 32)]
    seed = Taught(links=jobs).link_seeds(65536)["nvme>dram"]
    per_block = seed.seconds_per_piece + 65536 / seed.bandwidth_bytes_per_second
    assert seed.latency_seconds == pytest.approx(0.0005, rel=0.02)
    assert per_block == pytest.approx(0.0001, rel=0.02)
