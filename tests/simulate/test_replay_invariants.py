"""What holds of every replay, whatever is replayed on whatever: random workloads and tiers."""

import json
import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.cost.preempt import PreemptMode
from kvtiers.model.config import parse_mapping
from kvtiers.model.errors import CapacityError, ConfigError
from kvtiers.simulate.arrivals import ArrivalPlan
from kvtiers.simulate.generate import KINDS, Workload, generate
from kvtiers.simulate.machine import MachinePlan
from kvtiers.simulate.replay import ReplayPlan, replay
from kvtiers.simulate.report import page, plain

dram = st.sampled_from(["1GiB", "4GiB", "64GiB"]).map(lambda it: {"kind": "dram", "capacity": it})
stores = st.lists(
    st.sampled_from(
        [
            {"kind": "nvme", "paths": ["/a", "/b"], "capacity": "8GiB", "write": "back"},
            {"kind": "lmdb", "path": "/c", "capacity": "16GiB"},
            {"kind": "memory", "capacity": "2GiB"},
        ]
    ),
    max_size=2,
    unique_by=lambda it: it["kind"],
)
configs = st.builds(
    lambda first, rest, evict, offload: parse_mapping(
        {"tiers": [first, *rest], "policy": {"evict": evict, "offload": offload}}
    ),
    dram,
    stores,
    st.sampled_from(["lru", "arc", "s3-fifo", "w-tinylfu", "cost", "adaptive"]),
    st.sampled_from(["eager", "lazy"]),
)
machines = st.builds(
    MachinePlan,
    st.sampled_from(["llama-3.1-8b", "gemma-2-9b"]),
    st.sampled_from(["h100", "l40s"]),
    kv_dtype=st.sampled_from(["bf16", "fp8"]),
    tensor_parallel_size=st.sampled_from([1, 2]),
    utilization=st.sampled_from([0.6, 0.9]),
    block_size=st.sampled_from([16, 512]),
    max_num_seqs=st.sampled_from([1, 256]),
    preemption=st.sampled_from(list(PreemptMode)),
)
plans = st.builds(
    ReplayPlan,
    trace=st.builds(
        lambda *it: generate(Workload(*it)),
        st.sampled_from(sorted(KINDS)),
        st.sampled_from([1, 3, 15]),
        st.sampled_from([0.2, 20.0, 1e6]),
        st.integers(0, 9),
    ),
    machine=machines,
    config=st.one_of(st.none(), configs),
    arrivals=st.builds(
        ArrivalPlan, st.sampled_from([0.1, 1.0, 100.0]), st.sampled_from([None, 1, 3, 99])
    ),
    warmup=st.sampled_from([0.0, 0.4, 0.95]),
)


@settings(max_examples=15)
@given(plan=plans)
def test_reports_add_up_are_finite_and_the_same_again(plan):
    try:
        found = replay(plan)
    except (CapacityError, ConfigError):
        return  # that model, or every request, does not fit that device
    tokens = found.tokens
    assert found.complete
    counts = found.num_requests + found.num_warmup + found.num_skipped
    assert counts == len(plan.trace.requests)
    assert sum(tokens.hits.values()) + tokens.computed == tokens.prompt
    assert min(*tokens.hits.values(), tokens.computed) >= 0
    assert tokens.hit_rate <= found.infinite_hit_rate
    below = sum(num for tier, num in tokens.hits.items() if tier != "hbm")
    assert found.num_reloaded_tokens >= below
    for each in (found.ttft, found.wait, found.tpot, found.itl, found.e2e):
        marks = [each.p50, each.p90, each.p95, each.p99, each.most]
        if each.num:
            assert marks == sorted(marks)
            assert marks[0] >= 0
            assert each.mean <= each.most * (1 + 1e-9)
    for mark in ("p50", "p90", "most", "mean"):
        assert getattr(found.wait, mark) <= getattr(found.ttft, mark) <= getattr(found.e2e, mark)
    line = found.timeline
    for column in (line.kv_use, line.num_running, line.num_waiting, *line.tiers.values()):
        assert len(column) == len(line.seconds)
    assert all(0 <= share <= 1 for column in line.tiers.values() for share in column)
    assert line.seconds == sorted(line.seconds)
    told = plain([found], {})
    assert json.loads(json.dumps(told, allow_nan=False, default=dict))
    assert math.isfinite(sum(found.written_nbytes_per_device_day.values()))
    assert "http" not in page([found], None, {})
    again = replace(replay(plan), cpu_seconds=found.cpu_seconds)
    assert plain([again], {}) == told
