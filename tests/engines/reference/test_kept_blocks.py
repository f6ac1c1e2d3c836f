"""What the scheduler expects HBM to keep of a victim, by what became of those before it."""

from dataclasses import dataclass

import pytest

from kvtiers.cost.preempt import PreemptMode
from kvtiers.engines.reference.lower_tiers import LowerTiers

from .engines import engine_of, request_of, settings_of

SIZE = 4


@dataclass
class Asked:
    """About a victim: its blocks, those that are free, and the tokens that HBM should keep."""

    num_blocks: int
    num_free: int
    num_kept_tokens: int
    away: list[int]  # blocks handed out while earlier ones were away, as far as they are back


@pytest.fixture
def serve(monkeypatch):
    """Serve a long prompt beside requests that outgrow the pool; returns what was asked."""

    def serve(**knobs):
        knobs = {"watermark": 0.0, "max_num_batched_tokens": 64, **knobs}
        engine = engine_of(settings_of(20, preemption=PreemptMode.COST, **knobs))
        pool, left, away, asked = engine.scheduler.pool, {}, [], []

        def swap_pays(self, request, around):
            kept = around.num_kept_tokens
            asked.append(Asked(request.num_blocks, pool.num_free, kept, away.copy()))
            return False

        monkeypatch.setattr(LowerTiers, "swap_pays", swap_pays)
        for name, num_prompt, num_output in (("a", 20, 9), ("b", 8, 40), ("long", 44, 18)):
            engine.add(request_of(name, num_prompt, num_output))
        while engine.num_unfinished:
            before = pool.num_taken
            report = engine.step()
            left |= dict.fromkeys(report.preempted, before)
            away += [pool.num_taken - left.pop(it) for it in report.admitted if it in left]
        return asked

    return serve


def test_nothing_is_counted_on_until_a_victim_was_back(serve):
    first, *_ = serve()
    assert first.num_kept_tokens == 0


def test_then_it_is_what_was_not_handed_out_while_that_one_was_away(serve):
    asked = serve()
    _, second, *_ = asked
    assert len(second.away) == 1
    lost = max(0, second.away[0] - second.num_free)
    assert second.num_kept_tokens == (second.num_blocks - lost) * SIZE > 0


def test_without_a_prefix_cache_nothing_is_kept(serve):
    asked = serve(prefix_caching=False)
    assert len(asked) > 1
    assert {it.num_kept_tokens for it in asked} == {0}
