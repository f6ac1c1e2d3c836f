"""A vLLM engine in a child process, asked for one measurement at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from dataclasses import asdict
from typing import Any, Final, Self

from kvtiers.engines.vllm.drive import EVENT, Measured, Script
from kvtiers.model.errors import KVTiersError

_MODULE: Final = "kvtiers.engines.vllm.drive"
_LAST_LINES: Final = 20
_STOP_SECONDS: Final = 60


class EngineProcessError(KVTiersError):
    """The engine did not start, or stopped; the message holds its last words."""


class EngineProcess:
    """One engine; several may be alive at once, so that their measurements can take turns."""

    def __init__(self, script: Script, num_threads: int) -> None:
        """Start the engine, and wait until it is warm.

        Args:
            num_threads: OpenMP threads of a CPU engine.

        Raises:
            EngineProcessError: it did not start.
        """
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._process = subprocess.Popen(  # noqa: S603 - our own module, by our own interpreter
            [sys.executable, "-W", "ignore", "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=engine_environment(num_threads),
            text=True,
        )
        self._send(asdict(script))
        self.device = str(self._next("started")["device"])
        self._next("warm")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def run(self, name: str, what: str) -> Measured:
        """Do one step, as `kvtiers.engines.vllm.drive` describes it.

        Raises:
            EngineProcessError: the engine stopped.
        """
        self._send([name, what])
        return Measured(**self._next("measured"))

    def settle(self) -> None:
        """Wait until kvtiers has written all that it was about to write.

        Raises:
            EngineProcessError: the engine stopped.
        """
        self._send(["", "settle"])
        self._next("settled")

    def close(self) -> None:
        """End the engine."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _send(self, message: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._stopped() from None

    def _next(self, expected: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.startswith(EVENT):
                self._last.append(line)
                continue
            event: dict[str, Any] = json.loads(line.removeprefix(EVENT))
            if event.pop("event") == expected:
                return event
        raise self._stopped()

    def _stopped(self) -> EngineProcessError:
        code = self._process.wait(_STOP_SECONDS)
        return EngineProcessError(f"vLLM stopped with {code}; it said:\n{''.join(self._last)}")


def engine_environment(num_threads: int) -> dict[str, str]:
    """Return our own environment with what makes an engine quiet, and its timing too."""
    return {
        **os.environ,
        "GOMP_SPINCOUNT": "0",  # threads that spin at a barrier starve the rest of a small machine
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "passive",
        "TORCHDYNAMO_DISABLE": "1",  # its one compiled function costs the first request 14 s
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
