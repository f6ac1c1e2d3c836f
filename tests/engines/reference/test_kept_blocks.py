"""What the scheduler expects HBM to keep of a victim, by what became of those before it."""

from dataclasses import dataclass

import pytest

from kvtiers.cost.preempt import PreemptMode
from kvtiers.engines.reference.admission import Admission
from kvtiers.engines.reference.lower_tiers import LowerTiers

from .engines import engine_of, request_of, settings_of

SIZE = 4


@dataclass
class Asked:
    """About a victim: its blocks, those that are free, and the tokens that HBM may keep."""

    num_blocks: int
    num_free: int
    kept_tokens: tuple[int, ...]
    away: list[int]  # blocks handed out while earlier ones were away, as far as they are back


@pytest.fixture
def serve(monkeypatch):
    """Serve a long prompt beside requests that outgrow the pool; returns what was asked."""

    def serve(**knobs):
        knobs = {"watermark": 0.0, "max_num_batched_tokens": 64, **knobs}
        engine = engine_of(settings_of(20, preemption=PreemptMode.COST, **knobs))
        pool, left, away, asked = engine.scheduler.pool, {}, [], []

        def swap(self, request, num_tokens, around):
            kept = around.kept_tokens
            left[request.request_id] = pool.num_taken
            asked.append(Asked(request.num_blocks, pool.num_free, kept, away.copy()))

        def allocated(self, request, claims):
            if request.request_id in left:
                away.append(pool.num_taken - left.pop(request.request_id))
            allocate(self, request, claims)

        allocate = Admission.allocate
        monkeypatch.setattr(LowerTiers, "swap", swap)
        monkeypatch.setattr(Admission, "allocate", allocated)
        for name, num_prompt, num_output in (
            ("a", 20, 9),
            ("b", 8, 40),
            ("long", 44, 18),
            ("c", 30, 20),
            ("d", 24, 20),
        ):
            engine.add(request_of(name, num_prompt, num_output))
        while engine.num_unfinished:
            engine.step()
        return asked

    return serve


def test_nothing_is_counted_on_until_a_victim_was_back(serve):
    first, *_ = serve()
    assert first.kept_tokens == (0,)


def test_then_it_is_what_others_were_not_handed_out_while_each_was_away(serve):
    asked = serve()
    assert len(asked[-1].away) > 1
    for one in asked[1:]:
        lost = [max(0, num - one.num_free) for num in one.away]
        assert one.kept_tokens == tuple(max(0, one.num_blocks - num) * SIZE for num in lost)
    assert any(max(one.kept_tokens) for one in asked)


def test_without_a_prefix_cache_nothing_is_kept(serve):
    asked = serve(prefix_caching=False)
    assert len(asked) > 1
    assert not any(any(it.kept_tokens) for it in asked)
