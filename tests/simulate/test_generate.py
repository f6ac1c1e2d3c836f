import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.model.errors import ConfigError
from kvtiers.simulate.generate import KINDS, Workload, generate, write_trace
from kvtiers.simulate.trace import Trace, infinite_hit_tokens, load_trace

each_kind = pytest.mark.parametrize("kind", sorted(KINDS))


def plain(trace):
    return [
        (
            r.arrival_seconds,
            r.num_prompt_tokens,
            r.num_output_tokens,
            r.block_ids.tolist(),
            r.session,
            r.think_seconds,
        )
        for r in trace.requests
    ]


@each_kind
def test_the_same_seed_gives_the_same_trace_and_another_seed_another(kind):
    first, again, other = (generate(Workload(kind, 200, seed=seed)) for seed in (1, 1, 2))
    assert plain(first) == plain(again)
    assert plain(first) != plain(other)


@given(
    kind=st.sampled_from(sorted(KINDS)),
    num=st.integers(1, 150),
    rate=st.sampled_from([1e-6, 0.1, 2.0, 50.0, 1e5, 1e6]),
    seed=st.integers(0, 9),
)
def test_what_every_trace_keeps(kind, num, rate, seed):
    trace = generate(Workload(kind, num, rate, seed))
    assert len(trace.requests) == num
    arrivals = [request.arrival_seconds for request in trace.requests]
    assert arrivals == sorted(arrivals)
    assert all(request.num_output_tokens >= 1 for request in trace.requests)
    parents: dict[int, int] = {}
    for request in trace.requests:
        ids = request.block_ids.tolist()
        assert len(ids) == -(-request.num_prompt_tokens // 512)
        for parent, child in itertools.pairwise([-1, *ids]):
            assert parents.setdefault(child, parent) == parent


@each_kind
def test_a_trace_survives_its_file(kind, tmp_path):
    trace = generate(Workload(kind, 300, seed=5))
    path = tmp_path / f"{kind}.jsonl"
    write_trace(trace, path)
    found = load_trace(path)
    assert (found.name, found.block_size) == (kind, 512)
    assert plain(found) == plain(trace)


@pytest.mark.parametrize("kind", ["chat", "documents", "bursts", "mixed"])
def test_rate_is_kept(kind):
    trace = generate(Workload(kind, 2000, requests_per_second=0.5))
    assert 2000 / trace.seconds == pytest.approx(0.5, rel=0.2)


@pytest.mark.parametrize("kind", ["documents", "bursts", "mixed"])
@pytest.mark.parametrize("rate", [5e3, 1e6])
def test_a_rate_above_the_clock_of_a_trace_is_kept_as_well(kind, rate):
    trace = generate(Workload(kind, 20_000, requests_per_second=rate))
    assert 20_000 / rate == pytest.approx(trace.seconds, rel=0.2, abs=0.002)


def test_prompts_of_a_session_grow_and_begin_alike():
    trace = generate(Workload("chat", 400))
    last: dict[int, list[int]] = {}
    num_later = 0
    for request in trace.requests:
        ids = request.block_ids.tolist()
        if request.session in last:
            num_later += 1
            before = last[request.session]
            shared = len(before) - 1  # the last block was a part
            assert ids[:shared] == before[:shared]
            assert request.think_seconds is not None
        last[request.session] = ids
    assert num_later > 100


def test_kinds_are_what_they_are_called():
    rates = {kind: generate(Workload(kind, 500)) for kind in KINDS}
    hits = {
        kind: infinite_hit_tokens(trace.requests, trace.block_size).rate
        for kind, trace in rates.items()
    }
    assert hits["agents"] > 0.85
    assert hits["documents"] > 0.5
    assert hits["mixed"] < 0.2
    lengths = [request.num_prompt_tokens for request in rates["mixed"].requests]
    assert sum(n > 5000 for n in lengths) == 8 * (len(lengths) // 40) + max(0, 500 % 40 - 32)
    together = Counter(r.arrival_seconds for r in rates["mixed"].requests)
    assert max(together.values()) >= 8
    gaps = [
        later.arrival_seconds - sooner.arrival_seconds
        for sooner, later in itertools.pairwise(rates["bursts"].requests)
    ]
    assert sum(gaps[:63]) > 4 * sum(gaps[64:127])


def test_what_cannot_be_generated_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'chat'"):
        Workload("chats")
    with pytest.raises(ConfigError, match="0 requests at"):
        Workload("chat", 0)
    with pytest.raises(ConfigError, match="the format has 512"):
        write_trace(Trace("t", 64, ()), tmp_path / "t.jsonl")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_trace(generate(Workload("chat", 1)), tmp_path / "none" / "t.jsonl")
