"""Traces on which the replacement rules are compared that none of them was made for.

The public traces cut, shifted, mixed and disturbed, and synthetic ones; all in blocks of 512
tokens, and the same each time.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from kvtiers.simulate.generate import Workload, generate
from kvtiers.simulate.trace import Trace, TraceRequest, load_trace

_SIZE: Final = 512
_APART: Final = 1 << 32  # ids of two traces that share nothing
_ROOTS: Final = 8  # blocks; one that more than so many sessions begin with tells none apart

Requests = Sequence[TraceRequest]


def conversation(folder: Path) -> Requests:
    """Return an hour of an online chat; a session is what shares a prefix of its own."""
    requests = load_trace(folder / "mooncake_conversation_trace.jsonl", _SIZE).requests
    followers: dict[int, set[int]] = defaultdict(set)
    for it in requests:
        for before, block in zip(it.block_ids.tolist(), it.block_ids.tolist()[1:], strict=False):
            followers[before].add(block)
    sessions: dict[int, int] = {}
    named = []
    for it in requests:
        ids = it.block_ids.tolist()
        own = [block for block in ids if len(followers[block]) <= _ROOTS] or ids
        session = next((sessions[block] for block in own if block in sessions), len(named))
        sessions |= dict.fromkeys(own, session)
        named.append(replace(it, session=session))
    return named


def agents(folder: Path) -> Requests:
    """Return 35 sessions of coding agents at once."""
    return load_trace(folder / "coding_agent_sessions", _SIZE).requests


def synthetic(kind: str, num_requests: int, seed: int, rate: float = 2.0) -> Requests:
    """Return a generated workload."""
    return generate(Workload(kind, num_requests, rate, seed)).requests


# -- what is done to them --------------------------------------------------------------------


def in_time(requests: Iterable[TraceRequest]) -> Requests:
    """Return requests in the order of their times."""
    return sorted(requests, key=lambda it: it.arrival_seconds)


def part(requests: Requests, first: float, end: float) -> Requests:
    """Return a share of the requests, by their number."""
    return requests[int(first * len(requests)) : int(end * len(requests))]


def apart(requests: Requests, number: int) -> Requests:
    """Return the same requests about texts of their own."""
    return [
        replace(it, block_ids=it.block_ids + number * _APART, session=it.session + number * _APART)
        for it in requests
    ]


def later(requests: Requests, seconds: float) -> Requests:
    """Return the requests, all so much later."""
    return [replace(it, arrival_seconds=it.arrival_seconds + seconds) for it in requests]


def shuffled(requests: Requests, seed: int) -> Requests:
    """Return sessions that begin at random times; within a session nothing changes."""
    rng = random.Random(seed)
    began: dict[int, float] = {}
    for it in requests:
        began.setdefault(it.session, it.arrival_seconds)
    starts = list(began.values())
    rng.shuffle(starts)
    moved = dict(zip(began, starts, strict=True))
    return in_time(
        replace(it, arrival_seconds=it.arrival_seconds - began[it.session] + moved[it.session])
        for it in requests
    )


def one_after_another(*traces: Requests) -> Requests:
    """Return traces that follow each other, about different texts."""
    joined: list[TraceRequest] = []
    for number, requests in enumerate(traces):
        end = joined[-1].arrival_seconds if joined else 0.0
        joined += later(apart(requests, number), end - requests[0].arrival_seconds)
    return joined


def together(*traces: Requests) -> Requests:
    """Return traces at the same time, about different texts, stretched to equal length."""
    longest = max(requests[-1].arrival_seconds for requests in traces)
    rows = []
    for number, requests in enumerate(traces):
        stretch = longest / max(requests[-1].arrival_seconds, 1e-9)
        rows += [
            replace(it, arrival_seconds=it.arrival_seconds * stretch)
            for it in apart(requests, number)
        ]
    return in_time(rows)


def more_sessions(requests: Requests, num: int, least: int, seed: int) -> Requests:
    """Return so many sessions, drawn from those of `least` requests and more: each as often as any
    other, about texts of its own, and at a pace of its own, so that copies do not keep step."""
    rng = random.Random(seed)
    by_session: dict[int, list[TraceRequest]] = defaultdict(list)
    for it in requests:
        by_session[it.session].append(it)
    long = [rows for rows in by_session.values() if len(rows) >= least]
    drawn: list[TraceRequest] = []
    for number in range(num):
        if number % len(long) == 0:
            rng.shuffle(long)
        pace = rng.lognormvariate(0.0, 0.4)
        drawn += (
            replace(it, arrival_seconds=it.arrival_seconds * pace)
            for it in apart(long[number % len(long)], number)
        )
    return in_time(drawn)


def scanned(requests: Requests, every: int, num_blocks: int) -> Requests:
    """Return the requests, and one long prompt that nobody asks for again after so many."""
    rows: list[TraceRequest] = []
    for number, it in enumerate(requests):
        rows.append(it)
        if number % every == every - 1:
            rows.append(_prompt(it.arrival_seconds, 2 * _APART + number * num_blocks, num_blocks))
    return rows


def behind_tools(requests: Requests, num_tools: int, seed: int) -> Requests:
    """Return the requests behind long descriptions of tools, one for each session, of which a few
    are used by most."""
    rng = random.Random(seed)
    lengths = [rng.randrange(4, 24) for _ in range(num_tools)]
    weights = [1.0 / (number + 1) for number in range(num_tools)]
    chosen: dict[int, int] = {}
    rows = []
    for it in requests:
        if it.session not in chosen:
            chosen[it.session] = rng.choices(range(num_tools), weights)[0]
        tool = chosen[it.session]
        head = 2 * _APART + tool * 64 + np.arange(lengths[tool])
        # What followed another text is another block: a block is all that comes before it.
        ids = np.concatenate((head, it.block_ids + (3 + tool) * _APART))
        num_tokens = it.num_prompt_tokens + _SIZE * lengths[tool]
        rows.append(replace(it, block_ids=ids, num_prompt_tokens=num_tokens))
    return rows


def rounds(num_prompts: int, num_blocks: int, times: int, seed: int) -> Requests:
    """Return an evaluation: the same prompts in turn, again and again, and new ones between."""
    rng = random.Random(seed)
    rows = []
    for number in range(num_prompts * times):
        rows.append(_prompt(float(number), number % num_prompts * num_blocks, num_blocks))
        if rng.random() < 0.2:
            rows.append(_prompt(float(number), 2 * _APART + number * num_blocks, num_blocks))
    return rows


def popular(num_prompts: int, num: int, skew: float, drift: int, seed: int) -> Requests:
    """Return prompts by their popularity, which moves on by one prompt each `drift` requests."""
    rng = random.Random(seed)
    weights = [1.0 / (rank + 1) ** skew for rank in range(num_prompts)]
    lengths = [rng.randrange(2, 40) for _ in range(num_prompts)]
    order = rng.sample(range(num_prompts), num_prompts)
    rows = []
    for number in range(num):
        rank = rng.choices(range(num_prompts), weights)[0]
        prompt = order[(rank + number // drift) % num_prompts]
        rows.append(_prompt(float(number), prompt * 64, lengths[prompt]))
    return rows


def _prompt(at: float, first: int, num_blocks: int) -> TraceRequest:
    ids = first + np.arange(num_blocks)
    return TraceRequest(at, num_blocks * _SIZE, 100, ids, first)


# -- the traces ------------------------------------------------------------------------------


def _chat_and_agents(_: Path) -> Requests:
    return together(synthetic("chat", 4000, 401), synthetic("agents", 600, 402))


def _more_agents(seed: int) -> Callable[[Path], Requests]:
    return lambda data: more_sessions(agents(data), 66, 15, seed)


HELD_OUT: Final[Mapping[str, Callable[[Path], Requests]]] = MappingProxyType(
    {
        "first half of the hour": lambda data: part(conversation(data), 0.0, 0.5),
        "second half": lambda data: part(conversation(data), 0.5, 1.0),
        "every third request": lambda data: conversation(data)[::3],
        "sessions shuffled": lambda data: shuffled(conversation(data), 11),
        "two hours at once": lambda data: together(
            part(conversation(data), 0.0, 0.5), part(conversation(data), 0.5, 1.0)
        ),
        "hour with scans": lambda data: scanned(part(conversation(data), 0.2, 0.7), 10, 150),
        "hour behind tools": lambda data: behind_tools(part(conversation(data), 0.0, 0.5), 40, 12),
        "hour backwards": lambda data: part(conversation(data), 0.0, 0.5)[::-1],
        "odd agents": lambda data: [it for it in agents(data) if it.session % 2],
        "even agents": lambda data: [it for it in agents(data) if not it.session % 2],
        "agents one by one": lambda data: sorted(agents(data), key=lambda it: it.session),
        "agents shuffled": lambda data: shuffled(agents(data), 13),
        **{f"more agents, {seed}": _more_agents(seed) for seed in range(5)},
        "agents, then chat": lambda data: one_after_another(
            agents(data), part(conversation(data), 0.0, 0.4)
        ),
        "chat, then agents": lambda data: one_after_another(
            part(conversation(data), 0.3, 0.7), agents(data)
        ),
        "agents beside chat": lambda data: together(
            agents(data), part(conversation(data), 0.0, 0.4)
        ),
        "synthetic chat": lambda _: synthetic("chat", 8000, 301),
        "synthetic agents": lambda _: synthetic("agents", 1500, 302, 0.5),
        "many agents": lambda _: synthetic("agents", 1500, 303, 8.0),
        "documents": lambda _: synthetic("documents", 6000, 304),
        "bursts": lambda _: synthetic("bursts", 8000, 305),
        "short and long": lambda _: synthetic("mixed", 8000, 306),
        "chat and agents": _chat_and_agents,
        "documents, then others": lambda _: one_after_another(
            synthetic("documents", 3000, 307), synthetic("documents", 3000, 308)
        ),
        "chat, documents, agents": lambda _: one_after_another(
            synthetic("chat", 3000, 309),
            synthetic("documents", 2500, 310),
            synthetic("agents", 500, 311),
        ),
        "rounds": lambda _: rounds(150, 20, 40, 14),
        "rounds, then chat": lambda data: one_after_another(
            rounds(150, 20, 25, 15), part(conversation(data), 0.0, 0.3)
        ),
        "stable popularity": lambda _: popular(600, 6000, 1.0, 10**9, 16),
        "drifting popularity": lambda _: popular(1500, 6000, 1.0, 10, 17),
    }
)


def held_out(folder: Path, name: str) -> Trace:
    """Return a trace by its name in `HELD_OUT`."""
    return Trace(name, _SIZE, tuple(HELD_OUT[name](folder)))
