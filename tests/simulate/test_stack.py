from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.simulate.stack import StackDistances, knee
from kvtiers.simulate.trace import Trace, TraceRequest, infinite_hit_tokens, load_trace
from tests.simulate.traces import real_trace


def trace_of(prompts):
    """Return a trace whose ids name prefixes."""
    numbers: dict[tuple[int, ...], int] = {}
    requests = []
    for at, prompt in enumerate(prompts):
        prefixes = [tuple(prompt[: n + 1]) for n in range(len(prompt))]
        ids = [numbers.setdefault(prefix, len(numbers)) for prefix in prefixes]
        requests.append(TraceRequest(at, 512 * len(ids), 1, np.array(ids, np.int64), at))
    return Trace("t", 512, tuple(requests))


def lru_hit_blocks(trace, capacity):
    """Return what a least-recently-used cache hits, by playing it."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in trace.requests:
        ids = request.block_ids.tolist()
        hits += next((n for n, i in enumerate(ids) if i not in cache), len(ids))
        for block_id in reversed(ids):
            cache[block_id] = None
            cache.move_to_end(block_id)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=1, max_size=25)


@given(prompts=prompts, capacity=st.integers(1, 30))
def test_distances_say_what_a_played_cache_hits(prompts, capacity):
    trace = trace_of(prompts)
    found = StackDistances.of(trace, whole_blocks=False)
    expected = lru_hit_blocks(trace, capacity) * 512
    assert found.hit_tokens(capacity * 512).sum() == expected
    total = trace.num_prompt_tokens
    assert found.hit_rates([capacity * 512]) == [pytest.approx(expected / total)]


@given(prompts=prompts)
def test_a_large_cache_is_the_infinite_one(prompts):
    trace = trace_of(prompts)
    found = StackDistances.of(trace, whole_blocks=False)
    hit = infinite_hit_tokens(trace.requests, 512).num_hit_tokens
    assert found.hit_tokens(max(512, found.working_set_tokens)).sum() == hit
    engine = StackDistances.of(trace)
    assert engine.hit_tokens(10**9).sum() <= hit


def test_the_last_token_is_never_a_hit():
    trace = trace_of([[1, 2], [1, 2]])
    assert StackDistances.of(trace, whole_blocks=False).hit_tokens(10**6).tolist() == [0, 1024]
    assert StackDistances.of(trace).hit_tokens(10**6).tolist() == [0, 512]


def test_knee_is_where_the_curve_flattens():
    capacities = [float(n) for n in range(1, 21)]
    assert knee(capacities, [min(n, 4) / 4 for n in range(1, 21)]) == 4.0
    assert knee([1.0, 2.0], [0.0, 1.0]) == 2.0
    assert knee(capacities, [0.3] * 20) == 1.0
    assert knee(capacities, [0.0] * 20) == 1.0


@pytest.mark.parametrize("shoulder", [100.0, 1000.0, 5000.0])
def test_knee_of_an_s_shaped_curve_is_its_shoulder(shoulder):
    """On a logarithmic scale; behind the shoulder comes a long tail that hardly hits more."""
    capacities = [2.0 ** (n / 2) for n in range(40)]
    rates = [0.96 / (1 + (shoulder / c) ** 4) + 0.04 * c / capacities[-1] for c in capacities]
    assert shoulder < knee(capacities, rates) < 2.5 * shoulder


def test_knee_of_a_curve_that_rises_ever_faster_is_its_end():
    capacities = [float(n) for n in range(1, 11)]
    assert knee(capacities, [(n / 10) ** 3 for n in range(1, 11)]) == 10.0


def test_knee_counts_from_what_there_is_already():
    """What HBM hits in any case is no reason for a tier of that size."""
    capacities = [float(n) for n in range(1, 21)]
    rates = [0.5 if n < 10 else 0.5 + min(n - 10, 5) / 10 for n in range(1, 21)]
    assert knee(capacities, rates) == 1.0
    assert knee(capacities, rates, above=8.0) == 15.0
    assert knee(capacities, rates, above=30.0) == 20.0


@pytest.mark.parametrize(
    ("num_tokens", "rate"),
    [(500_000, 0.045), (1_500_000, 0.066), (3_100_000, 0.141), (12_300_000, 0.313)],
)
def test_conversation_trace_hits_what_was_published_for_lru(distances, num_tokens, rate):
    assert distances.hit_rates([num_tokens]) == [pytest.approx(rate, rel=0.03)]


@pytest.fixture(scope="module")
def distances():
    trace = load_trace(real_trace("mooncake_conversation_trace.jsonl"))
    return StackDistances.of(trace, whole_blocks=False)
