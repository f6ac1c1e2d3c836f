import pytest

from kvtiers.model.errors import ConfigError
from kvtiers.simulate.goal import Goal, GoalKind, Prices


def test_goals_are_read_and_judged():
    half = Goal.parse("ttft-p90=0.5x")
    assert half == Goal(GoalKind.TTFT, 0.5, relative=True)
    assert half.met(1.0, 0.0, before=2.0)
    assert not half.met(1.01, 0.0, before=2.0)
    assert not half.met(0.1, 0.0, before=None)
    assert Goal.parse("ttft-p90=250ms").limit_seconds(None) == 0.25
    rate = Goal.parse("hit-rate=0.3")
    assert rate.met(None, 0.3, None)
    assert not rate.met(0.001, 0.29, 1.0)
    assert rate.limit_seconds(1.0) is None
    assert Goal.parse("cost=500") == Goal(GoalKind.COST, 500.0)


@pytest.mark.parametrize(
    "text",
    [
        *("", "ttft-p90", "ttft-p90=", "ttft-p90=2", "ttft-p90=0x", "ttft-p90=1.5x"),
        *("ttft-p90=-1s", "hit-rate=1.2", "hit-rate=x", "hit-rate=-1", "latency=1s", "cost=0"),
    ],
)
def test_what_is_no_goal_is_refused_with_examples(text):
    with pytest.raises(ConfigError, match=r"--goal: .*write ttft-p90=0\.5x"):
        Goal.parse(text)


def test_prices_are_for_a_gb():
    assert Prices(dram=4.0, nvme=0.1).of(10e9, 1000e9) == 140.0
