"""Synthetic traces of typical workloads, the same for the same seed."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from kvtiers.model.errors import ConfigError
from kvtiers.observe.files import write_whole
from kvtiers.simulate.trace import CONVERSATION_BLOCK_SIZE, Trace, TraceRequest

_SIZE: Final = CONVERSATION_BLOCK_SIZE
_MOST_RATE: Final = 1e6
_TICK_SECONDS: Final = 0.001  # of the clock of a trace
_MOST_CONTEXT: Final = 120_000  # a session that has grown so long ends


@dataclass(frozen=True, slots=True)
class Workload:
    """What to generate.

    Attributes:
        kind: a name of `KINDS`.
        num_requests: at least 1. requests_per_second: on average, over the whole trace.
        seed: equal workloads are equal traces.
    """

    kind: str
    num_requests: int = 1000
    requests_per_second: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            near = get_close_matches(self.kind, KINDS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ConfigError(
                f"no workload {self.kind!r} is known{hint} Known: {', '.join(sorted(KINDS))}"
            )
        rate = self.requests_per_second
        if self.num_requests < 1 or not 1 / _MOST_RATE <= rate <= _MOST_RATE:
            raise ConfigError(
                f"{self.num_requests} requests at {rate} a second: there must be at least 1, from "
                f"{1 / _MOST_RATE:g} to {_MOST_RATE:g} a second"
            )


@dataclass(frozen=True, slots=True)
class _Call:
    """A request before it is numbered; times in whole milliseconds, as files keep them."""

    at: int
    num_prompt_tokens: int
    num_output_tokens: int
    ids: tuple[int, ...]
    session: int
    think_ms: int | None = None


class _Text:
    """What was said so far: whole blocks, each with an id that names all before it."""

    def __init__(self, ids: Iterable[int] = (), num_tokens: int = 0) -> None:
        self._ids = list(ids)
        self.num_tokens = num_tokens

    def extend(self, num_tokens: int, new_id: Iterator[int]) -> None:
        """Add tokens that nobody else has said."""
        self.num_tokens += num_tokens
        while len(self._ids) < self.num_tokens // _SIZE:
            self._ids.append(next(new_id))

    def ids(self, new_id: Iterator[int]) -> tuple[int, ...]:
        """Return one id per block; of the last, which may be a part, a new one."""
        partial = self.num_tokens % _SIZE > 0
        return (*self._ids, *((next(new_id),) if partial else ()))

    def fork(self) -> _Text:
        """Return a text that begins with the whole blocks of this one."""
        return _Text(self._ids, len(self._ids) * _SIZE)


class _Author:
    """Draws what a workload is made of."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.random = random.Random(workload.seed)
        self.new_id = itertools.count()
        self.sessions = itertools.count()
        self._owed_ms = 0.0

    def text(self, num_tokens: int) -> _Text:
        """Return a new text."""
        text = _Text()
        text.extend(num_tokens, self.new_id)
        return text

    def tokens(self, median: float, spread: float, most: int = _MOST_CONTEXT) -> int:
        """Return a number of tokens, log-normal; `spread`: of its logarithm."""
        return max(1, min(most, round(median * math.exp(self.random.gauss(0.0, spread)))))

    def wait_ms(self, mean_seconds: float) -> int:
        """Return an exponential time; short ones add up to what they are on average."""
        wait = self.random.expovariate(1.0 / mean_seconds) * 1000
        if mean_seconds >= _TICK_SECONDS:
            return round(wait)
        self._owed_ms += wait
        whole = int(self._owed_ms)
        self._owed_ms -= whole
        return whole

    def call(self, at: int, text: _Text, output: int, session: int, think: int | None) -> _Call:
        """Return a request with this text as its prompt."""
        return _Call(at, text.num_tokens, output, text.ids(self.new_id), session, think)


def _dialogues(
    author: _Author,
    opening: Callable[[], _Text],
    num_turns: float,
    turn: tuple[float, float],
    think_seconds: float,
) -> Iterator[_Call]:
    """Yield the turns of one session after another: each prompt holds all that was said.

    Args:
        num_turns: of a session, on average. turn: median tokens of what is asked and answered.
    """
    workload, at = author.workload, 0
    while True:
        session, text, now, think = next(author.sessions), opening(), at, None
        while text.num_tokens < _MOST_CONTEXT:
            text.extend(author.tokens(turn[0], 0.9, 20_000), author.new_id)
            output = author.tokens(turn[1], 0.7, 4000)
            yield author.call(now, text, output, session, think)
            if author.random.random() < 1.0 / num_turns:
                break
            text.extend(output, author.new_id)
            think = author.wait_ms(think_seconds)
            now += think + output * 20  # as if answered at 50 tokens a second
        at += author.wait_ms(num_turns / workload.requests_per_second)


def _chat(author: _Author) -> Iterator[_Call]:
    """Yield chats of several turns behind one of three system prompts."""
    prompts = [author.text(num) for num in (512, 1024, 2048)]
    yield from _dialogues(
        author, lambda: author.random.choice(prompts).fork(), 5.0, (150.0, 300.0), 30.0
    )


def _agents(author: _Author) -> Iterator[_Call]:
    """Yield coding agents: a long context that grows with every call, and hardly a pause."""
    tools = author.text(10_240)

    def opening() -> _Text:
        text = tools.fork()
        text.extend(author.tokens(12_000, 0.6, 60_000), author.new_id)
        return text

    yield from _dialogues(author, opening, 25.0, (1500.0, 200.0), 5.0)


def _documents(author: _Author) -> Iterator[_Call]:
    """Yield questions about documents, of which a few are asked about again and again."""
    documents = [author.text(author.tokens(12_000, 0.7, 80_000)) for _ in range(200)]
    weights = [1.0 / rank for rank in range(1, len(documents) + 1)]
    at = 0
    while True:
        text = author.random.choices(documents, weights)[0].fork()
        text.extend(author.tokens(60, 0.5, 2000), author.new_id)
        output = author.tokens(200, 0.6, 2000)
        yield author.call(at, text, output, next(author.sessions), None)
        at += author.wait_ms(1.0 / author.workload.requests_per_second)


def _bursts(author: _Author) -> Iterator[_Call]:
    """Yield a chat service of which half the requests come in bursts, ten times as fast."""
    rate = author.workload.requests_per_second
    system, at = author.text(1024), 0
    for number in itertools.count():
        text = system.fork()
        text.extend(author.tokens(1500, 1.0, 16_000), author.new_id)
        yield author.call(at, text, author.tokens(300, 0.7, 2000), next(author.sessions), None)
        calm = number // 64 % 2 == 0
        # Both halves together take as long as requests at the average rate.
        at += author.wait_ms(20.0 / 11.0 / rate if calm else 2.0 / 11.0 / rate)


def _mixed(author: _Author) -> Iterator[_Call]:
    """Yield short requests all the time, and long ones together: what pushes memory over."""
    rate = author.workload.requests_per_second
    system, at = author.text(512), 0
    for number in itertools.count():
        text = system.fork()
        if number % 40 >= 32:  # eight at once
            text.extend(author.tokens(30_000, 0.4, 100_000), author.new_id)
            output = author.tokens(600, 0.4, 2000)
        else:
            text.extend(author.tokens(200, 0.6, 1000), author.new_id)
            output = author.tokens(120, 0.6, 1000)
            at += author.wait_ms(1.25 / rate)
        yield author.call(at, text, output, next(author.sessions), None)


KINDS: Final[Mapping[str, Callable[[_Author], Iterator[_Call]]]] = MappingProxyType(
    {
        "chat": _chat,
        "agents": _agents,
        "documents": _documents,
        "bursts": _bursts,
        "mixed": _mixed,
    }
)
"""Name to generator: requests without end, each session's in order."""


def generate(workload: Workload) -> Trace:
    """Return a trace in blocks of 512 tokens."""
    author = _Author(workload)
    calls = sorted(_first(KINDS[workload.kind](author), workload), key=lambda call: call.at)
    numbers: dict[int, int] = {}
    sessions: dict[int, int] = {}
    requests = tuple(
        TraceRequest(
            arrival_seconds=call.at / 1000.0,
            num_prompt_tokens=call.num_prompt_tokens,
            num_output_tokens=call.num_output_tokens,
            block_ids=np.array([numbers.setdefault(i, len(numbers)) for i in call.ids], np.int64),
            session=sessions.setdefault(call.session, len(sessions)),
            think_seconds=None if call.think_ms is None else call.think_ms / 1000.0,
        )
        for call in calls[: workload.num_requests]
    )
    return Trace(workload.kind, _SIZE, requests)


def _first(calls: Iterator[_Call], workload: Workload) -> Iterator[_Call]:
    """Yield what may be among the first requests to arrive: sessions begin in order, and go on."""
    arrivals: list[int] = []
    starts: dict[int, int] = {}
    for call in calls:
        start = starts.setdefault(call.session, call.at)
        if len(arrivals) >= workload.num_requests and len(starts) > 1 and start == call.at:
            arrivals.sort()
            del arrivals[workload.num_requests :]
            if start >= arrivals[-1]:
                return  # nothing that begins from here on is among them, or before them
        arrivals.append(call.at)
        yield call


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace as JSONL, one request a line; `load_trace` reads it back equal.

    Beside what the format has, each line names the session, and the think time where there is one.

    Raises:
        ConfigError: the blocks are not of 512 tokens, or the file cannot be written.
    """
    if trace.block_size != _SIZE:
        raise ConfigError(f"blocks of {trace.block_size} tokens; the format has {_SIZE}")
    lines = "".join(json.dumps(_plain(request)) + "\n" for request in trace.requests)
    try:
        write_whole({path: lines.encode()})
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error


def _plain(request: TraceRequest) -> dict[str, object]:
    line: dict[str, object] = {
        "timestamp": round(request.arrival_seconds * 1000),
        "input_length": request.num_prompt_tokens,
        "output_length": request.num_output_tokens,
        "hash_ids": request.block_ids.tolist(),
        "session": request.session,
    }
    if request.think_seconds is not None:
        line["think_time"] = request.think_seconds
    return line
