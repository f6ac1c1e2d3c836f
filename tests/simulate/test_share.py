from collections import Counter

import numpy as np
import pytest

from kvtiers.model.errors import ConfigError
from kvtiers.simulate.generate import Workload, generate
from kvtiers.simulate.share import busiest_share, servable
from kvtiers.simulate.trace import Trace, TraceRequest, infinite_hit_tokens


def test_one_engine_gets_all():
    trace = generate(Workload("chat", 20))
    assert busiest_share(trace, 1) is trace


@pytest.mark.parametrize("kind", ["chat", "agents", "documents"])
def test_shares_are_about_even_and_keep_what_is_used_again(kind):
    trace = generate(Workload(kind, 400, seed=1))
    share = busiest_share(trace, 3)
    tokens = share.num_prompt_tokens
    assert trace.num_prompt_tokens / 3 <= tokens <= 0.45 * trace.num_prompt_tokens
    whole = infinite_hit_tokens(trace.requests, 512).rate
    assert infinite_hit_tokens(share.requests, 512).rate >= 0.7 * whole


def test_a_session_stays_where_its_prefix_is():
    trace = generate(Workload("agents", 300, seed=2))
    share = busiest_share(trace, 2)
    whole, mine = (Counter(r.session for r in t.requests) for t in (trace, share))
    split = [session for session in mine if mine[session] < whole[session]]
    assert len(split) <= len(mine) // 4


def test_a_prompt_that_all_share_does_not_pile_up():
    ids = np.arange(4, dtype=np.int64)
    requests = tuple(TraceRequest(float(n), 2048, 1, ids, n) for n in range(100))
    share = busiest_share(Trace("same", 512, requests), 4)
    assert 25 <= len(share.requests) <= 32


def test_more_engines_than_requests_are_refused():
    trace = generate(Workload("chat", 3))
    with pytest.raises(ConfigError, match="4 engines share 3 requests"):
        busiest_share(trace, 4)


def test_what_no_engine_serves_makes_none_the_busiest():
    ids = np.arange(100, dtype=np.int64)
    long = TraceRequest(0.0, 51_200, 1, ids, 0)
    short = tuple(TraceRequest(1.0 + n, 1024, 1, 1000 * (n + 1) + ids[:2], n) for n in range(2))
    trace = Trace("long", 512, (long, *short))
    assert busiest_share(trace, 2).requests == (long,)
    assert busiest_share(trace, 2, longest=51_201).requests == (long,)
    assert long in busiest_share(trace, 2, longest=51_200).requests
    assert len(busiest_share(trace, 2, longest=51_200).requests) == 2
    assert servable(trace, 51_200).requests == short
    assert servable(trace, 51_201) is trace
    with pytest.raises(ConfigError, match="every request of long is longer than the 1,024 tokens"):
        servable(trace, 1024)
