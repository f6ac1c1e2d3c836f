"""The reference engine: one scheduler around a runner, step by step."""

from __future__ import annotations

from kvtiers.engines.reference.report import Gauges, StepReport
from kvtiers.engines.reference.requests import NewRequest
from kvtiers.engines.reference.runners import Runner
from kvtiers.engines.reference.settings import EngineSettings


class Engine:
    """Requests in, tokens out. Not thread-safe; the runner's clock is the only one.

    Driving it is a loop: add what has arrived by `now`, `step` while there are unfinished
    requests, `wait_until` the next arrival otherwise.
    """

    def __init__(self, settings: EngineSettings, runner: Runner) -> None:
        self.settings = settings
        self.runner = runner

    @property
    def now(self) -> float:
        """Seconds on the runner's clock: virtual ones where it models."""
        return self.runner.now

    @property
    def num_unfinished(self) -> int:
        """Requests that are waiting, running or swapped."""
        raise NotImplementedError

    @property
    def gauges(self) -> Gauges:
        """How the engine stands."""
        raise NotImplementedError

    def add(self, request: NewRequest) -> None:
        """Queue a request.

        Raises:
            CapacityError: it could never run, however empty the engine is.
            ConfigError: its id is taken, or it is a group and there is no kvtiers to swap it to.
        """
        raise NotImplementedError

    def abort(self, request_id: str) -> None:
        """End a request wherever it stands; the next step reports it. One that is unknown or
        over is left alone."""
        raise NotImplementedError

    def step(self, idle_until: float | None = None) -> StepReport:
        """Schedule, run and take in one step.

        Args:
            idle_until: until when at most a step without tokens waits for a load; None: for as
                long as it takes to make progress.
        """
        raise NotImplementedError

    def wait_until(self, seconds: float) -> None:
        """Let time pass without work, as far as a time on the clock; offloads go on."""
        raise NotImplementedError

    def settle(self) -> None:
        """Run idle steps until kvtiers has nothing left to do."""
        raise NotImplementedError

    def reset(self) -> bool:
        """Serve nothing from caches that was computed before, as after a change of weights.

        Running requests are computed again. Returns whether a later life will know of it.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release the runner's memory and kvtiers; idempotent."""
        raise NotImplementedError
