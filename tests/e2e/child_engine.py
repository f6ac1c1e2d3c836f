"""An engine in a child process, asked over a pipe: what a test may kill."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from .answers import Answer, Prompt
from .harness import Engine, EngineOptions
from .tiers import Tiers
from .warm import WARM

_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """What a rank's file store says of itself."""

    num_slots: int
    num_free: int
    num_frames: int


class ChildEngine:
    """One in-process engine in another process. Ended by `stop`, `kill`, or with the parent.

    `start` makes the engine, and raises what that raises.
    """

    def __init__(self) -> None:
        self._pipe, theirs = WARM.Pipe()
        self._process = WARM.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process.pid is not None
        return self._process.pid

    def start(self, options: EngineOptions, model_directory: Path) -> Self:
        """Start the engine as a start of the server does: it may find what stores hold."""
        self._ask("start", options, model_directory)
        return self

    def generate(self, prompt: Prompt, max_tokens: int = 12) -> tuple[Answer, dict[str, int]]:
        """Return the answer to ``prompt``, and the tokens that were reloaded for it, by tier.

        The engine's own prefix cache is empty before.
        """
        answer, reloaded = self._ask("generate", prompt, max_tokens)
        return answer, reloaded

    def file_store(self) -> StoreFacts:
        """Return what the file store says, once nothing is under way."""
        return self._ask("file_store")  # type: ignore[no-any-return]

    def work(self, prompts: Sequence[Prompt]) -> None:
        """Run these prompts again and again, in a random order, until `rest` or `kill`."""
        self._pipe.send(("work", list(prompts)))

    def rest(self) -> list[tuple[Prompt, Answer]]:
        """Stop working; returns all answers."""
        return self._ask("rest")  # type: ignore[no-any-return]

    def kill(self) -> None:
        """End the process by SIGKILL."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def stop(self) -> None:
        """End the engine as a server ends, and wait for its process."""
        self._ask("stop")
        self._process.join(_TIMEOUT_SECONDS)
        assert self._process.exitcode == 0
        self._pipe.close()

    def _ask(self, what: str, *args: Any) -> Any:
        self._pipe.send((what, *args))
        assert self._pipe.poll(_TIMEOUT_SECONDS), f"no answer to {what}"
        try:
            ok, answer = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise AssertionError(f"the engine died of {self._process.exitcode}") from None
        if not ok:
            raise RuntimeError(answer)
        return answer


class _Server:
    """The child's side."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "not started"
        return self._engine

    def start(self, options: EngineOptions, model_directory: Path) -> None:
        self._engine = Engine(options, model_directory)

    def generate(self, prompt: Prompt, max_tokens: int) -> tuple[Answer, dict[str, int]]:
        self.engine.settle()
        assert self.engine.reset_prefix_cache()
        tiers = Tiers(self.engine)
        [answer] = self.engine.generate([prompt], max_tokens)
        self.engine.settle()
        return answer, tiers.by_tier()

    def file_store(self) -> StoreFacts:
        self.engine.settle()
        store = Tiers(self.engine).store("nvme")
        return StoreFacts(store.num_slots, store.num_free, len(store.keys()))

    def work(self, prompts: Sequence[Prompt]) -> list[tuple[Prompt, Answer]]:
        """Keep two requests running until the parent says anything; the engine forgets them."""
        source = random.Random(time.time_ns())
        names: dict[str, Prompt] = {}
        while not self._pipe.poll():
            if len(self.engine.running) < 2:
                prompt = source.choice(prompts)
                names[self.engine.add(prompt, source.randrange(2, 12))] = prompt
            self.engine.step()
            self.engine.reset_prefix_cache()  # whenever it can
        self._pipe.recv()  # "rest"
        answers = self.engine.run()
        return [(prompt, answers[name]) for name, prompt in names.items()]

    def stop(self) -> None:
        self.engine.shutdown()


def _serve(pipe: Connection) -> None:
    """Do what the parent asks, one thing after another."""
    server = _Server(pipe)
    with contextlib.suppress(EOFError):
        for _ in itertools.count():
            what, *args = pipe.recv()
            act: Callable[..., Any] = getattr(server, what)
            try:
                answer = True, act(*args)
            except Exception as error:  # noqa: BLE001 - thread top: the parent raises it
                answer = False, f"{type(error).__name__}: {error}"
            pipe.send(answer)
            if what == "stop":
                return
