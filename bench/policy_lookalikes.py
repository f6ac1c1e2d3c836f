"""Traces made to look like public ones that are not here, by what is published about those.

Tool calls: 23,600 requests in an hour, 8,600 tokens each, 0.59 of which were seen before, most of
it in the prompts that describe an agent's tools. Long documents: 4,000 requests of 15,000 tokens,
two thirds seen before: several questions about each document, chats among them. Agent sessions:
prompts grow from 20,000 to 115,000 tokens, 0.97 of which were seen before; an hour each.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np

from kvtiers.simulate.trace import TraceRequest

_SIZE: Final = 512

Requests = Sequence[TraceRequest]
_Row = tuple[float, list[int], int, int]  # when, ids, tokens, session


def tool_calls(
    seed: int, num: int = 23_600, num_agents: int = 120, skew: float = 1.1, turns: float = 1.15
) -> Requests:
    """Return the calls of agents by their popularity, of which some go on for a few turns."""
    rng, ids, sessions = random.Random(seed), itertools.count(), itertools.count()
    root = [next(ids)]
    heads = [[*root, *_new(ids, _blocks(rng, 8, 0.7, 60))] for _ in range(num_agents)]
    weights = [1.0 / (rank + 1) ** skew for rank in range(num_agents)]
    rows: list[_Row] = []
    seconds = 3600.0 * turns / num
    now = 0.0
    while len(rows) < num:
        now += rng.expovariate(1.0 / seconds)
        text = list(rng.choices(heads, weights)[0])
        session, at = next(sessions), now
        while True:
            text = text + _new(ids, _blocks(rng, 3.5, 1.0, 120))
            rows.append((at, [*text, next(ids)], _tokens(rng, text), session))
            if rng.random() < 1.0 / turns:
                break
            at += rng.expovariate(1.0 / 20.0)
    return _requests(rows[:num])


def long_documents(seed: int, num: int = 4000, questions: float = 3.0) -> Requests:
    """Return questions about documents, each asked within some time, and chats among them."""
    rng, ids, sessions = random.Random(seed), itertools.count(), itertools.count()
    rows: list[_Row] = []
    while len(rows) < num:
        session, at = next(sessions), rng.uniform(0.0, 3600.0)
        is_chat = rng.random() < 0.4
        text = _new(ids, _blocks(rng, 2 if is_chat else 32, 0.8, 250))
        pause = math.exp(rng.gauss(math.log(90.0), 1.0))
        while True:
            if is_chat:
                text = text + _new(ids, _blocks(rng, 2, 0.8, 40))
            rows.append((at, [*text, next(ids)], _tokens(rng, text), session))
            if rng.random() < 1.0 / questions:
                break
            at += rng.expovariate(1.0 / pause)
    return _requests(rows)


def agent_sessions(
    seed: int, num_sessions: int = 40, num_heads: int = 0, most_turns: int = 250
) -> Requests:
    """Return sessions of coding agents, which read files, think, wait for a user, start again.

    Args:
        num_heads: of prompts that sessions share; 0: nothing is shared.
    """
    rng, ids = random.Random(seed), itertools.count()
    heads = [_new(ids, rng.randrange(20, 40)) for _ in range(num_heads)]
    rows: list[_Row] = []
    for session in range(num_sessions):
        head = rng.choice(heads) if heads else _new(ids, rng.randrange(20, 40))
        text = list(head) + _new(ids, _blocks(rng, 4, 1.0, 100))
        at = rng.uniform(0.0, 3600.0)
        for _ in range(min(most_turns, max(3, int(math.exp(rng.gauss(4.0, 1.0)))))):
            rows.append((at, [*text, next(ids)], _tokens(rng, text), session))
            text = text + _new(ids, _blocks(rng, 1, 1.2, 60))
            if len(text) > 300:
                text = list(head) + _new(ids, 12)  # what was said is summed up
            waits = rng.random() < 0.1
            at += rng.expovariate(1.0 / (240.0 if waits else 8.0))
    return _requests(rows)


def _new(ids: Iterator[int], num: int) -> list[int]:
    return list(itertools.islice(ids, num))


def _blocks(rng: random.Random, median: float, spread: float, most: int) -> int:
    return min(most, round(median * math.exp(rng.gauss(0.0, spread))))


def _tokens(rng: random.Random, text: Sequence[int]) -> int:
    """Return the tokens of a text and a part of a block."""
    return len(text) * _SIZE + rng.randrange(1, _SIZE)


def _requests(rows: list[_Row]) -> Requests:
    return [
        TraceRequest(at, tokens, 150, np.array(ids), session)
        for at, ids, tokens, session in sorted(rows, key=lambda row: row[0])
    ]


LOOKALIKES: Final[Mapping[str, Callable[[], Requests]]] = MappingProxyType(
    {
        "tool calls": lambda: tool_calls(501),
        "long documents": lambda: long_documents(503),
        "agent sessions": lambda: agent_sessions(505),
        "tool calls of many agents": lambda: tool_calls(502, num_agents=400, skew=0.9, turns=1.5),
        "long documents, more questions": lambda: long_documents(504, questions=4.0),
        "agent sessions, shared prompts": lambda: agent_sessions(506, 30, 3),
    }
)
