from collections import Counter

import numpy as np
import pytest

from kvtiers.model.errors import ConfigError
from kvtiers.simulate.generate import Workload, generate
from kvtiers.simulate.share import busiest_share
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
