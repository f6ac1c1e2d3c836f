"""The engine's own server without kvtiers: the same answers over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest

from .answers import random_prompt
from .api_server import api_server
from .harness import EngineOptions, Engines

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_the_server_answers_like_an_engine_in_process(engines: Engines, tmp_path: Path) -> None:
    options = EngineOptions(log_stats=True)
    prompts = [random_prompt(300, seed=5), random_prompt(333, seed=6)]
    expected = [answer.token_ids for answer in engines.get(options).generate(prompts, 12)]
    engines.shutdown()
    directory = engines.model_directory(options.model)
    with api_server(options, directory, tmp_path / "server.log") as server:
        for _ in range(2):
            assert [server.complete(prompt, 12).token_ids for prompt in prompts] == expected
        server.reset_prefix_cache(reset_connector=True)
        assert server.complete(prompts[0], 12, cache_salt="red").token_ids == expected[0]
        assert "vllm:prefix_cache_hits_total" in server.metrics()
        assert server.stop() == 0, server.log()
