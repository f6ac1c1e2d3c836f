from dataclasses import replace

import pytest

from kvtiers.model.config import parse_config
from kvtiers.model.errors import CapacityError
from kvtiers.simulate.generate import Workload, generate
from kvtiers.simulate.goal import Goal
from kvtiers.simulate.machine import MachinePlan
from kvtiers.simulate.sizes import Size, candidates, frame_nbytes_per_token
from kvtiers.simulate.sizing import SizingPlan
from kvtiers.simulate.sizing_report import write_sizing
from kvtiers.simulate.sizing_run import size_tiers
from kvtiers.simulate.sizing_words import sentences
from kvtiers.simulate.trace import Trace

GIB = 2**30
MACHINE = MachinePlan("llama-3.1-8b", "l40s", utilization=0.7)
DOCUMENTS = generate(Workload("documents", 100, requests_per_second=0.4, seed=3))


def size(goal="ttft-p90=0.7x", **more):
    plan = {"trace": DOCUMENTS, "machine": MACHINE, "goal": Goal.parse(goal), "warmup": 0.2}
    plan |= more
    return size_tiers(SizingPlan(**plan))


@pytest.fixture(scope="module")
def halved():
    return size(kv_dtypes=("bf16", "fp8"))


def test_the_cheapest_replayed_size_that_meets_the_goal_is_chosen(halved):
    before = halved.trials[0].replay.ttft.p90
    for dtype in ("bf16", "fp8"):
        chosen = halved.chosen[dtype]
        assert chosen.replay.ttft.p90 <= 0.7 * before
        met = [t.cost for t in halved.trials if t.kv_dtype == dtype and t.met]
        assert chosen.cost == min(met)
    assert halved.complete
    assert halved.chosen["bf16"].cost < halved.trials[1].cost


def test_the_yaml_is_the_chosen_size(halved):
    config = parse_config(halved.yaml)
    chosen = halved.chosen["bf16"].size
    assert config.dram.capacity == chosen.dram_nbytes
    assert sum(tier.capacity for tier in config.stores) == chosen.nvme_nbytes


def test_the_answer_names_sizes_knee_limit_and_what_fp8_changes(halved):
    text = " ".join(sentences(halved))
    for word in ("Goal: p90 TTFT", "Cheapest found: DRAM", "What binds:", "Knee of the hit curve"):
        assert word in text
    assert "With the KV cache in fp8, p90 TTFT without tiers is" in text
    assert "the goal needs" in text


def test_report_files_are_written(halved, tmp_path):
    written, _ = write_sizing(halved, tmp_path, "size")
    assert {path.name for path in written} >= {"size.json", "size.html"}
    page = (tmp_path / "size.html").read_text()
    assert "kind: dram" in page
    assert "What was replayed" in page


def test_a_goal_that_no_cache_meets_names_the_limit():
    found = size("hit-rate=0.99", trace=generate(Workload("mixed", 60)))
    assert (found.chosen, found.yaml) == ({}, None)
    assert found.limit.startswith("the trace: ")
    assert len(found.trials) == 2


def test_hit_rate_is_a_goal():
    found = size("hit-rate=0.4")
    assert found.chosen["bf16"].replay.tokens.hit_rate >= 0.4


def test_money_buys_the_best_size_within_it():
    found = size("cost=80")
    chosen = found.chosen["bf16"]
    assert 0 <= chosen.cost <= 80
    others = [t.replay.ttft.p90 for t in found.trials if t.cost <= 80]
    assert chosen.replay.ttft.p90 == min(others)


def test_time_that_is_up_is_said():
    found = size(max_seconds=0.0)
    assert not found.complete
    assert len(found.trials) == 1
    assert "stopped early" in " ".join(sentences(found))
    assert found.limit.startswith("not known")


def test_what_would_not_start_is_refused_before_anything_is_replayed():
    with pytest.raises(CapacityError, match="does not even load"):
        size(machine=MachinePlan("llama-3.1-70b", "h100"))


def test_a_trace_without_any_reuse_is_sized_too():
    requests = generate(Workload("mixed", 30)).requests
    lonely = tuple(
        replace(request, block_ids=request.block_ids + 10**6 * number)
        for number, request in enumerate(requests)
    )
    found = size(trace=Trace("lonely", 512, lonely))
    assert found.chosen == {}
    assert found.infinite_hit_rate == 0.0


def test_candidates_begin_with_none_and_end_with_all_in_dram():
    found = candidates(100e9)
    assert found[0] == Size(0, 0)
    assert found[-1].nvme_nbytes == 0
    assert found[-1].dram_nbytes >= 100e9
    assert all(it.dram_nbytes % GIB == 0 for it in found)
    assert str(found[0]) == "no tiers"
    assert str(Size(4 * GIB, 64 * GIB)) == "DRAM 4GiB + NVMe 64GiB"


def test_a_token_needs_its_kv_and_a_share_of_a_frames_header():
    assert frame_nbytes_per_token(MACHINE) == 131_072 + 4096 / 16
    fp8 = frame_nbytes_per_token(replace(MACHINE, kv_dtype="fp8"))
    assert fp8 == 65_536 + 4096 / 16
