"""Replays hit what another simulator hits, request by request, where copies take no time."""

from dataclasses import replace

import pytest

from kvtiers.cost.links import LinkSeed
from kvtiers.model.config import Config
from kvtiers.simulate.arrivals import ArrivalPlan
from kvtiers.simulate.generate import Workload, generate
from kvtiers.simulate.machine import MachinePlan
from kvtiers.simulate.replay import ReplayPlan, replay

from .three_tiers import ThreeTiers

FRAME_NBYTES = 32 * (16 * 131_072 + 4096)  # of llama-3.1-8b, 512 tokens
BETWEEN = {"reload": {"sync_below": "0ms"}}  # a load within a step puts off what is written back
CALLS = generate(Workload("agents", 240))
ONE_BY_ONE = replace(
    CALLS,
    requests=tuple(
        replace(it, session=number, think_seconds=None) for number, it in enumerate(CALLS.requests)
    ),
)


class _AtOnce(MachinePlan):
    """Copies take no time."""

    __slots__ = ()

    def machine(self, config):
        found = super().machine(config)
        return replace(found, links=dict.fromkeys(found.links, LinkSeed(0.0, 0.0, 1e28)))


@pytest.mark.parametrize(
    ("dram", "store", "write"),
    [
        (900, 0, "through"),
        (900, 2500, "through"),
        (500, 900, "through"),
        (900, 2500, "back"),
        (500, 900, "back"),
    ],
)
def test_each_tier_hits_what_it_would_as_a_cache_of_its_size(dram, store, write):
    tiers = [{"kind": "dram", "capacity": f"{dram * FRAME_NBYTES}B"}]
    if store:
        more = {"paths": ["/nowhere"], "capacity": f"{store * FRAME_NBYTES}B", "write": write}
        tiers.append({"kind": "nvme", **more})
    config = Config.model_validate({"tiers": tiers, "cost": {"mode": "always"}, **BETWEEN})
    machine = _AtOnce(model="llama-3.1-8b", hardware="h100", utilization=0.5)
    found = replay(ReplayPlan(ONE_BY_ONE, machine, config, arrivals=ArrivalPlan(1.0, 1)))
    settings = machine.settings(ONE_BY_ONE)
    other = ThreeTiers(
        settings.num_blocks, dram, store, settings.max_num_batched_tokens, back=write == "back"
    )
    hits = [0, 0, 0]
    for it in ONE_BY_ONE.requests:
        served = other.serve(it.block_ids.tolist(), it.num_prompt_tokens, it.num_output_tokens)
        hits = [512 * num + total for num, total in zip(served, hits, strict=True)]
    assert found.num_skipped == 0
    assert list(found.tokens.hits.values()) == hits[: 2 + bool(store)]
    assert all(hits[: 2 + bool(store)])
