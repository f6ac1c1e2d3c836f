"""Runs vLLM's OpenAI-compatible server in a process of its own, for prompts of token ids."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from .answers import Answer, Prompt
from .harness import EngineOptions


class ApiServer:
    """One server; everything that a test asks of it goes over HTTP."""

    def __init__(self, options: EngineOptions, model_directory: Path, log_path: Path) -> None:
        self._log_path = log_path
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        arguments = options.engine_args(model_directory)
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "random"]
        command += [text for name, value in arguments.items() for text in _flag(name, value)]
        environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        with log_path.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120.0)

    def wait_until_ready(self, timeout_seconds: float = 120.0) -> None:
        """Return when the server answers; AssertionError with its log if it does not."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                if self._client.get("/health").status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                time.sleep(0.2)
            assert self.process.poll() is None, f"the server ended: {self.log()[-4000:]}"
            assert time.monotonic() < deadline, f"the server is not ready: {self.log()[-4000:]}"

    def complete(
        self, prompt: Prompt, max_tokens: int = 8, cache_salt: str | None = None
    ) -> Answer:
        """Return the greedy answer to ``prompt``."""
        body: dict[str, Any] = {
            "model": "random",
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "detokenize": False,
        }
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        response = self._client.post("/v1/completions", json=body)
        assert response.status_code == httpx.codes.OK, response.text
        [choice] = response.json()["choices"]
        return Answer(
            token_ids=tuple(choice["token_ids"]),
            logprobs=(),
            finish_reason=choice["finish_reason"],
        )

    def metrics(self) -> str:
        """Return the page of Prometheus metrics."""
        return self._client.get("/metrics").text

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> None:
        """Forget the engine's own prefix cache."""
        response = self._client.post(
            "/reset_prefix_cache", params={"reset_external": reset_connector}
        )
        assert response.status_code == httpx.codes.OK, response.text

    def log(self) -> str:
        """Return what the server and its workers have printed."""
        return self._log_path.read_text()

    def stop(self, timeout_seconds: float = 60.0) -> int:
        """End the server as an operator would, and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(timeout_seconds)
        self._client.close()
        return status


@contextmanager
def api_server(
    options: EngineOptions, model_directory: Path, log_path: Path
) -> Iterator[ApiServer]:
    """Run a server that is ready, and end it afterwards whatever happens."""
    server = ApiServer(options, model_directory, log_path)
    try:
        server.wait_until_ready()
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


def _flag(name: str, value: Any) -> list[str]:
    """Return an argument of ``EngineArgs`` as it is written on the command line."""
    flag = "--" + name.replace("_", "-")
    if value is True:
        return [flag]
    if value is False:
        return []
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
