"""A burst that pushes the KV over the edge hurts others, and three things bound the damage."""

from dataclasses import dataclass

import pytest

from kvtiers.cost.preempt import PreemptMode

from .engines import engine_of, request_of, settings_of, tiers_of

KNOBS = {
    "max_model_len": 300,
    "watermark": 0.0,
    "max_num_seqs": 24,
    "max_num_batched_tokens": 128,
    "preemption": PreemptMode.RECOMPUTE,
}


@dataclass
class Damage:
    """What the steady tenant's requests met."""

    p99_seconds: float
    num_preemptions: int
    num_recomputed_tokens: int


def traffic(*, burst):
    """Short requests all the time; and at once, long prompts and long answers of somebody else."""
    steady = [
        request_of(f"s{idx}", 12, 20, arrived_at=0.2 * idx, tenant="steady") for idx in range(60)
    ]
    if not burst:
        return steady
    sizes = [(120, 100)] * 4 + [(8, 90)] * 20
    return steady + [
        request_of(f"b{idx}", *size, arrived_at=1.0, tenant="burst")
        for idx, size in enumerate(sizes)
    ]


def damage(config=None, *, burst=True, **knobs):
    engine = engine_of(settings_of(160, **{**KNOBS, **knobs}), config)
    requests = sorted(traffic(burst=burst), key=lambda request: request.arrived_at)
    served = []
    while requests or engine.num_unfinished:
        while requests and requests[0].arrived_at <= engine.now:
            engine.add(requests.pop(0))
        due = requests[0].arrived_at if requests else None
        if engine.num_unfinished:
            served += engine.step(due).finished
        else:
            engine.wait_until(due)
    assert len(served) == len(traffic(burst=burst))
    mine = [it for it in served if it.tenant == "steady"]
    seconds = sorted(it.e2e_seconds for it in mine)
    return Damage(
        seconds[int(0.99 * (len(seconds) - 1))],
        sum(it.num_recomputes + it.num_swaps for it in mine),
        sum(it.num_recomputed_tokens for it in mine),
    )


@pytest.fixture(scope="module")
def unbounded():
    return damage()


def test_a_burst_makes_others_pay_for_recomputation(unbounded):
    calm = damage(burst=False)
    assert (calm.num_preemptions, calm.num_recomputed_tokens) == (0, 0)
    assert unbounded.p99_seconds > 10 * calm.p99_seconds
    assert unbounded.num_recomputed_tokens > 100


def test_a_share_bounds_the_damage(unbounded):
    half, third = damage(tenant_share=0.5), damage(tenant_share=0.3)
    assert third.p99_seconds < half.p99_seconds < unbounded.p99_seconds / 2
    assert third.num_recomputed_tokens < half.num_recomputed_tokens
    assert half.num_recomputed_tokens < unbounded.num_recomputed_tokens


def test_a_limit_of_admissions_bounds_the_damage(unbounded):
    limited = damage(max_num_seqs=8)
    assert (limited.num_preemptions, limited.num_recomputed_tokens) == (0, 0)
    assert limited.p99_seconds < unbounded.p99_seconds


def test_a_swap_bounds_the_damage(unbounded):
    swapped = damage(tiers_of(dram="8MiB"), preemption=PreemptMode.SWAP)
    assert swapped.num_recomputed_tokens < unbounded.num_recomputed_tokens / 4
    assert swapped.p99_seconds < unbounded.p99_seconds
