"""What the tokens of a step mean for the requests that get them."""

import itertools
from dataclasses import replace

import pytest

from kvtiers.engines.reference.requests import NewRequest

from .engines import engine_of, run, settings_of, tiers_of


def counting(engine):
    """Number the tokens that a virtual model generates: 1, 2, 3, ..."""
    num, run_step = itertools.count(1), engine.runner.run

    def numbered(work, orders):
        result = run_step(work, orders)
        tokens = {name: [next(num) for _ in got] for name, got in result.tokens.items()}
        return replace(result, tokens=tokens)

    engine.runner.run = numbered


@pytest.mark.parametrize(("stop", "max_tokens"), [(7, 30), (None, 7)])
def test_what_was_guessed_beyond_the_end_is_not_output(stop, max_tokens):
    """1, 2 to 5, and of 6 to 9 the first two."""
    knobs = settings_of(max_num_batched_tokens=64, num_speculative_tokens=3)
    engine = engine_of(knobs, acceptance=1.0)
    counting(engine)
    prompt, stop_ids = list(range(100, 108)), frozenset({stop} - {None})
    engine.add(NewRequest("r", 0.0, max_tokens, prompt, stop_token_ids=stop_ids))
    reports = run(engine)
    (served,) = reports[-1].finished
    assert served.token_ids == [[1, 2, 3, 4, 5, 6, 7]]
    assert served.reason == ("length" if stop is None else "stop")
    assert [len(report.itl_seconds) for report in reports] == [0, 4, 2]
    assert sum(report.num_output_tokens for report in reports) == 7


def test_a_group_of_which_one_sequence_stops_has_stopped():
    engine = engine_of(config=tiers_of())
    counting(engine)
    prompt = list(range(100, 108))
    engine.add(NewRequest("g", 0.0, 3, prompt, num_sequences=2, stop_token_ids=frozenset({4})))
    (served,) = run(engine)[-1].finished
    assert served.token_ids == [[1, 3, 5], [2, 4]]
    assert (served.reason, served.num_output_tokens) == ("stop", 5)
