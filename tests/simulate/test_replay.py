import itertools
from dataclasses import asdict, replace
from random import Random

import pytest

from kvtiers.model.config import parse_mapping
from kvtiers.model.errors import CapacityError, ConfigError
from kvtiers.simulate.arrivals import ArrivalPlan
from kvtiers.simulate.generate import Workload, generate
from kvtiers.simulate.machine import MachinePlan
from kvtiers.simulate.measures import Percentiles, RunLengths, Timeline
from kvtiers.simulate.replay import ReplayPlan, replay
from kvtiers.simulate.trace import Trace

MACHINE = MachinePlan("llama-3.1-8b", "l40s", utilization=0.6)
TIERS = parse_mapping(
    {
        "tiers": [
            {"kind": "dram", "capacity": "20GB"},
            {"kind": "nvme", "paths": ["/nowhere/kvtiers"], "capacity": "200GB"},
        ]
    }
)
CHAT = generate(Workload("documents", 150, requests_per_second=1.0, seed=3))


def run(**more):
    return replay(ReplayPlan(**{"trace": CHAT, "machine": MACHINE, "config": TIERS} | more))


def test_hits_by_tier_and_computed_tokens_are_all_prompt_tokens():
    found = run()
    tokens = found.tokens
    assert found.complete
    assert found.num_requests == 150
    assert tokens.prompt == CHAT.num_prompt_tokens
    assert tokens.output == CHAT.num_output_tokens
    assert list(tokens.hits) == ["hbm", "dram", "nvme"]
    assert all(num > 0 for num in tokens.hits.values())
    assert sum(tokens.hits.values()) + tokens.computed == tokens.prompt
    assert 0 < tokens.hit_rate <= found.infinite_hit_rate
    assert found.num_preemptions == 0
    # What the engine says that it computed: all but the hits, and each output but its last token.
    assert found.num_computed_tokens == tokens.computed + tokens.output - found.num_requests
    assert found.num_reloaded_tokens == tokens.hits["dram"] + tokens.hits["nvme"]
    assert found.saved_seconds > 0


def test_a_replay_is_the_same_each_time_but_for_what_it_took():
    first, again = run(), run()
    same = replace(again, cpu_seconds=first.cpu_seconds)
    assert same.to_plain() == first.to_plain()


def test_tiers_save_time_and_without_them_there_is_hbm_alone():
    tiers, none = run(), run(config=None)
    assert list(none.tokens.hits) == ["hbm"]
    assert none.written_nbytes == {}
    assert none.num_reloaded_tokens == 0
    assert tiers.ttft.p90 < none.ttft.p90
    assert tiers.tokens.hit_rate > none.tokens.hit_rate


def test_writes_are_counted_per_device_and_day():
    found = run()
    written = found.written_nbytes["nvme"]
    assert written > 0
    a_day = found.written_nbytes_per_device_day["nvme"]
    assert a_day == pytest.approx(written / found.seconds * 86_400)
    two = TIERS.model_dump(mode="json", by_alias=True)
    two["tiers"][1]["paths"] = ["/nowhere/a", "/nowhere/b"]
    half = run(config=parse_mapping(two)).written_nbytes_per_device_day["nvme"]
    assert half == pytest.approx(a_day / 2, rel=0.05)


def test_the_timeline_shows_every_tier_shared_stores_too():
    shared = {"kind": "lmdb", "path": "/nowhere/kvtiers.lmdb", "capacity": "50GB"}
    tiers = {"tiers": [{"kind": "dram", "capacity": "20GB"}, shared]}
    line = run(config=parse_mapping(tiers)).timeline
    assert set(line.tiers) == {"dram", "lmdb"}
    assert 0 < max(line.tiers["lmdb"]) <= 1


def test_warm_up_fills_caches_and_is_not_measured():
    whole, warm = run(), run(warmup=0.5)
    assert (warm.num_warmup, warm.num_requests) == (75, 75)
    assert warm.tokens.prompt == sum(r.num_prompt_tokens for r in CHAT.requests[75:])
    assert warm.tokens.hit_rate > whole.tokens.hit_rate
    assert warm.infinite_hit_rate > whole.infinite_hit_rate
    assert warm.seconds < whole.seconds
    assert warm.written_nbytes["nvme"] < whole.written_nbytes["nvme"]


def test_warm_up_of_a_closed_loop_is_what_comes_first():
    """A session's later turns stand behind others in the trace, and come before them."""
    chat = generate(Workload("chat", 120, seed=3))
    loop = {"trace": chat, "machine": MACHINE, "config": None, "warmup": 0.5}
    warm = replay(ReplayPlan(**loop, arrivals=ArrivalPlan(concurrency=4)))
    whole = replay(ReplayPlan(**loop | {"warmup": 0.0}, arrivals=ArrivalPlan(concurrency=4)))
    assert (warm.num_warmup, warm.num_requests) == (60, 60)
    # Half of the requests, in the time after the first half: as many a second as of all.
    assert warm.requests_per_second == pytest.approx(whole.requests_per_second, rel=0.25)
    assert warm.began_seconds + warm.seconds == pytest.approx(whole.seconds)


def test_what_a_cache_that_forgets_nothing_hits_is_of_what_was_served():
    """An engine that is stopped has served the first requests, which hit less than later ones."""

    def stop(ended, _num):
        if ended == 20 and not stopped:
            stopped.append(ended)
            raise KeyboardInterrupt

    stopped = []
    found = replay(ReplayPlan(CHAT, MACHINE, None, arrivals=ArrivalPlan(speed=0.01)), stop)
    first = replay(
        ReplayPlan(
            Trace(CHAT.name, CHAT.block_size, CHAT.requests[: found.num_requests]), MACHINE, None
        )
    )
    assert found.infinite_hit_rate == first.infinite_hit_rate < run().infinite_hit_rate


def test_time_in_the_queue_is_a_part_of_the_time_to_the_first_token():
    busy = run(arrivals=ArrivalPlan(speed=50.0))
    idle = run(arrivals=ArrivalPlan(speed=0.01))
    assert busy.wait.num == busy.ttft.num == 150
    assert 0.9 * busy.ttft.mean < busy.wait.mean < busy.ttft.mean
    assert idle.wait.p90 < 0.01 * idle.ttft.p90


def test_files_of_the_machine_that_a_configuration_is_for_are_not_touched(tmp_path):
    log = tmp_path / "decisions.jsonl"
    files = {"decision_log": str(log), "calibration": str(tmp_path / "gone.json")}
    tiers = parse_mapping(TIERS.model_dump(mode="json", by_alias=True) | {"cost": files})
    found = run(config=tiers)
    assert not log.exists()
    assert set(found.ignored) == {"cost.calibration", "cost.decision_log"}
    assert found.tokens == run().tokens


def test_time_is_told_of_every_token():
    found = run()
    assert found.ttft.num == found.e2e.num == 150
    assert found.itl.num == sum(r.num_output_tokens - 1 for r in CHAT.requests)
    assert found.tpot.num == sum(r.num_output_tokens > 1 for r in CHAT.requests)
    assert found.e2e.p50 > found.ttft.p50
    assert found.output_tokens_per_second == pytest.approx(found.tokens.output / found.seconds)


def test_closed_loop_never_has_more_at_once_than_asked():
    found = run(arrivals=ArrivalPlan(concurrency=3))
    line = found.timeline
    both = [
        sum(counts)
        for counts in zip(line.num_running, line.num_waiting, line.num_swapped, strict=True)
    ]
    assert found.complete
    assert max(both) <= 3


def test_slower_arrivals_wait_less():
    fast, slow = run(arrivals=ArrivalPlan(speed=4.0)), run(arrivals=ArrivalPlan(speed=0.25))
    assert slow.ttft.p90 < fast.ttft.p90
    assert slow.seconds > fast.seconds


def test_a_burst_that_waits_long_is_not_kept_up_with_however_late_the_last_one_comes():
    requests = generate(Workload("mixed", 200, seed=1)).requests
    alone = tuple(
        replace(it, arrival_seconds=0.0, block_ids=it.block_ids + 10**6 * number)
        for number, it in enumerate(requests)
    )
    last = replace(alone[-1], arrival_seconds=36_000.0)
    found = run(trace=Trace("burst", 512, (*alone[:-1], last)), config=None)
    assert (found.num_late, found.load) == (0, pytest.approx(1.0, abs=0.01))
    assert 60 < found.wait.p90 <= found.ttft.p90
    assert not found.keeps_up
    few = run(trace=Trace("few", 512, (*alone[:10], last)), config=None)
    assert few.wait.p90 < 60
    assert few.keeps_up


def test_a_smaller_pool_preempts_and_says_what_recompute_that_causes():
    machine = replace(MACHINE, utilization=0.45, max_num_seqs=64)
    found = run(machine=machine, config=None, arrivals=ArrivalPlan(speed=20.0))
    assert found.complete
    assert found.num_preemptions > 0
    assert found.num_recomputed_tokens > 0
    assert sum(found.tokens.hits.values()) + found.tokens.computed == found.tokens.prompt


def test_requests_that_never_fit_are_skipped_and_counted():
    longest = max(r.num_prompt_tokens + r.num_output_tokens for r in CHAT.requests)
    found = run(machine=replace(MACHINE, max_model_len=longest - 1))
    assert (found.num_skipped, found.num_requests) == (1, 149)
    with pytest.raises(ConfigError, match="every request of documents is longer than the 10"):
        run(machine=replace(MACHINE, max_model_len=10))


def test_what_would_not_start_is_refused():
    with pytest.raises(CapacityError, match="does not even load"):
        run(machine=MachinePlan("llama-3.1-70b", "h100"))
    with pytest.raises(ConfigError, match="blocks of 512 tokens do not consist of blocks of 48"):
        run(machine=replace(MACHINE, block_size=48))
    with pytest.raises(ConfigError, match="no tier 'tape' has a medium to choose; known: lmdb"):
        run(machine=replace(MACHINE, media={"tape": "sata"}))
    with pytest.raises(ConfigError, match="a warm-up of 1 must be"):
        run(warmup=1)


def test_media_are_chosen_by_store_or_kind():
    slow = run(machine=replace(MACHINE, media={"nvme": "sata"}))
    assert slow.tokens.hits["nvme"] < run().tokens.hits["nvme"]


def test_time_that_is_up_ends_it_with_what_there_is():
    found = run(max_seconds=0.0)
    assert not found.complete
    assert found.num_requests < 150
    assert sum(found.tokens.hits.values()) + found.tokens.computed == found.tokens.prompt


def test_an_interrupt_ends_it_with_what_there_is():
    def stop(ended, num):
        if ended == 20 and not stopped:
            stopped.append(ended)
            raise KeyboardInterrupt

    stopped = []
    found = replay(ReplayPlan(CHAT, MACHINE, TIERS), stop)
    assert not found.complete
    assert found.num_requests == 20


def test_percentiles_of_nothing_are_none():
    assert Percentiles.of([]) == Percentiles()
    assert Percentiles.of([1.0, 3.0]).mean == 2.0


def test_what_repeats_is_kept_once_and_measured_as_if_it_were_not():
    random, kept, plain = Random(1), RunLengths(), []
    for _ in range(500):  # steps in which nearly all sequences waited for as long as each other
        values = [random.expovariate(1.0)] * random.randint(0, 60)
        values += [random.random() for _ in range(random.choice((0, 0, 0, 3)))]
        kept.extend(values)
        plain += values
    found, wanted = kept.percentiles(), Percentiles.of(plain)
    assert asdict(found) == pytest.approx(asdict(wanted), rel=1e-12)
    assert kept.num_kept < len(plain) / 5
    assert RunLengths().percentiles() == Percentiles()
    kept = RunLengths()
    kept.extend([2.0])
    assert kept.percentiles() == Percentiles.of([2.0])


def test_timeline_stays_short_and_evenly_apart():
    line, now = Timeline(), 0.0
    for _ in range(20_000):
        now += 0.1
        if line.due(now):
            line.add(now, 0.5, (1, 2, 3), {"dram": 0.25})
    assert 200 < len(line.seconds) <= 800
    assert {len(line.kv_use), len(line.num_waiting), len(line.tiers["dram"])} == {len(line.seconds)}
    gaps = [later - sooner for sooner, later in itertools.pairwise(line.seconds)]
    assert max(gaps) < 4 * min(gaps)
