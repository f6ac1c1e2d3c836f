"""Traces of requests: two public formats, read and validated into one."""

from __future__ import annotations

import math
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtiers.simulate.trace_fields import Fields, TraceError, fail, parse_object

Int64s = npt.NDArray[np.int64]

CONVERSATION_BLOCK_SIZE: Final = 512
_ROOT: Final = -1
_MOST_NESTED: Final = 100  # sub-agents within sub-agents
_OF_SESSIONS: Final = {"block_size": None, "hash_id_scope": "local"}  # names to defaults


class TraceFormat(Enum):
    """How a trace is written."""

    CONVERSATION = "conversation"  # one JSON object a line, one id per 512 tokens
    SESSIONS = "sessions"  # one JSON file a coding-agent session, commonly 64 tokens an id


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request.

    Attributes:
        arrival_seconds: since the trace began, as recorded.
        num_output_tokens: what it generated; at least 0.
        block_ids: one per block of the prompt, the last of which may be a part. Equal ids are
            equal prefixes, across the whole trace. Tokens after the last id are never shared.
        session: a number of the conversation that it belongs to; where the trace does not say,
            each request has its own.
        think_seconds: from the end of the session's request before to this one; None: not
            recorded.
    """

    arrival_seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: Int64s
    session: int
    think_seconds: float | None = None

    @property
    def num_tokens(self) -> int:
        """Of prompt and output; at least one token is generated."""
        return self.num_prompt_tokens + max(1, self.num_output_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A whole trace.

    Attributes:
        name: of its file or folder.
        block_size: tokens of a block.
        requests: by arrival; at least one.
    """

    name: str
    block_size: int
    requests: tuple[TraceRequest, ...]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.num_prompt_tokens for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(request.num_output_tokens for request in self.requests)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].arrival_seconds - self.requests[0].arrival_seconds

    def coarser(self, most_tokens: int) -> Trace:
        """Return the trace with blocks merged to larger ones of at most `most_tokens` tokens.

        The tokens of a prompt behind its last whole block are then never shared.
        """
        step = most_tokens // self.block_size
        if step < 2:
            return self
        requests = tuple(
            replace(request, block_ids=request.block_ids[step - 1 :: step])
            for request in self.requests
        )
        return Trace(self.name, step * self.block_size, requests)


def load_trace(path: str | Path, block_size: int | None = None) -> Trace:
    """Read a whole trace, and put it in the order of arrival.

    Args:
        path: a JSONL file, a session's JSON file, or a folder of sessions.
        block_size: tokens of a block: a multiple of the trace's own, which is taken if None.

    Raises:
        TraceError: it cannot be read, holds no request, or has blocks that do not fit.
    """
    reader = TraceReader(Path(path), block_size)
    requests = sorted(reader, key=lambda request: request.arrival_seconds)
    return Trace(Path(path).stem, reader.block_size, tuple(requests))


# The infinite cache


@dataclass(frozen=True, slots=True)
class HitTokens:
    """Prompt tokens, and those among them whose KV a cache had."""

    num_hit_tokens: int
    num_prompt_tokens: int

    @property
    def rate(self) -> float:
        """Share of the prompt tokens that were hits; 0 without any."""
        return self.num_hit_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


def infinite_hit_tokens(requests: Iterable[TraceRequest], block_size: int) -> HitTokens:
    """Return what a cache that forgets nothing would hit; see `infinite_hits`."""
    hit = total = 0
    known: set[int] = set()
    for request in requests:
        hit += _hit_tokens(request, block_size, known)
        total += request.num_prompt_tokens
    return HitTokens(hit, total)


def infinite_hits(requests: Iterable[TraceRequest], block_size: int) -> Iterator[int]:
    """Yield the prompt tokens of each request that a cache that forgets nothing would hit.

    A hit is a leading block that an earlier request had; each request's own blocks count as known
    once the next one arrives.
    """
    known: set[int] = set()
    for request in requests:
        yield _hit_tokens(request, block_size, known)


def _hit_tokens(request: TraceRequest, block_size: int, known: set[int]) -> int:
    ids = request.block_ids.tolist()
    num_blocks = next((n for n, found in enumerate(ids) if found not in known), len(ids))
    known.update(ids[num_blocks:])
    return min(num_blocks * block_size, request.num_prompt_tokens)


# Reading


class _Prefixes:
    """Numbers the prefixes: a block's own id says nothing without what stands before it."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def chain(self, ids: Sequence[int], root: int) -> list[int]:
        """Return one number per block; `root`: whose ids these are."""
        numbers, parent, chain = self._numbers, root, []
        for found in ids:
            parent = numbers.setdefault((parent, found), len(numbers))
            chain.append(parent)
        return chain


class TraceReader:
    """Yields the requests as they stand in the file, or session after session.

    A line, or a session, is in memory at a time, and what tells blocks apart. See `load_trace`.

    Attributes:
        block_size: tokens of the blocks that it yields; 0 until one was read, if none was asked
            for.
    """

    def __init__(self, path: Path, block_size: int | None) -> None:
        self._path = path
        self._format, self._paths = _files(path)
        self._asked = block_size
        self._prefixes = _Prefixes()
        self.block_size = block_size or 0

    def __iter__(self) -> Iterator[TraceRequest]:
        read = self._conversation if self._format is TraceFormat.CONVERSATION else self._sessions
        none = True
        for request in read():
            none = False
            yield request
        if none:
            fail(str(self._path), "holds no request")

    def _conversation(self) -> Iterator[TraceRequest]:
        step = self._step(CONVERSATION_BLOCK_SIZE, str(self._path))
        path = self._paths[0]
        for session, (number, line) in enumerate(_lines(path)):
            place = f"{path}:{number}"
            fields = Fields(parse_object(line.rstrip(b"\r\n"), place), place)
            num_tokens = fields.whole("input_length", 1)
            ids = fields.ids("hash_ids", num_tokens, CONVERSATION_BLOCK_SIZE)
            yield TraceRequest(
                arrival_seconds=fields.seconds("timestamp", 1000.0),
                num_prompt_tokens=num_tokens,
                num_output_tokens=fields.whole("output_length", 0),
                block_ids=self._blocks(ids, _ROOT, step),
                session=fields.whole("session", 0) if "session" in fields.values else session,
                think_seconds=fields.optional_seconds("think_time"),
            )

    def _sessions(self) -> Iterator[TraceRequest]:
        for session, path in enumerate(self._paths):
            document = Fields(parse_object(_content(path), str(path)), str(path))
            if "requests" not in document.values and "input_length" in document.values:
                fail(
                    str(path),
                    "is a request of a conversation trace, not a session; write one such object a "
                    "line to a JSONL file",
                )
            block_size = document.whole("block_size", 1)
            step = self._step(block_size, str(path))
            scope = document.values.get("hash_id_scope", "local")
            if scope not in ("local", "global"):
                fail(str(path), f"'hash_id_scope' is {scope!r}, not 'local' or 'global'")
            root = _ROOT if scope == "global" else _ROOT - 1 - session
            for start, fields in _flat(document, 0.0, document, 0):
                num_tokens = fields.whole("in", 1)
                yield TraceRequest(
                    arrival_seconds=start + fields.seconds("t"),
                    num_prompt_tokens=num_tokens,
                    num_output_tokens=fields.whole("out", 0),
                    block_ids=self._blocks(
                        fields.ids("hash_ids", num_tokens, block_size), root, step
                    ),
                    session=session,
                    think_seconds=fields.optional_seconds("think_time"),
                )

    def _step(self, own: int, place: str) -> int:
        """Return how many of the trace's own blocks one asked for has."""
        asked = self._asked or self.block_size or own
        if asked % own:
            fail(
                place,
                f"has ids of {own} tokens, which make no blocks of {asked}; "
                f"ask for a multiple, such as {math.lcm(own, asked)} (--trace-block)",
            )
        self.block_size = asked
        return asked // own

    def _blocks(self, ids: list[int], root: int, step: int) -> Int64s:
        """Return one number per whole block of `step` ids; with 1, the last may be a part."""
        chain = self._prefixes.chain(ids, root)
        return np.array(chain[step - 1 :: step], dtype=np.int64)


def _flat(
    agent: Fields, start: float, session: Fields, depth: int
) -> Iterator[tuple[float, Fields]]:
    """Yield the requests of an agent with those of its sub-agents, and when their time begins."""
    for name, default in _OF_SESSIONS.items():
        whole = session.values.get(name, default)
        if agent.values.get(name, whole) != whole:
            fail(agent.place, f"{name!r} differs from that of the session; write it there only")
    if depth > _MOST_NESTED:
        fail(session.place, f"has sub-agents more than {_MOST_NESTED} deep; that is no session")
    for fields in agent.objects("requests"):
        if "requests" not in fields.values:
            yield start, fields
            continue
        if "in" in fields.values:
            yield start, fields
        yield from _flat(fields, _start_of(fields, start), session, depth + 1)


def _start_of(agent: Fields, start: float) -> float:
    """Return when the time of a sub-agent begins; `start`: when that of its own entry does.

    Its requests count from when it was started, as the format says, or go on counting from where
    its entry does, as in many published files: the first of them is nearer to the one or the other.
    """
    began = agent.seconds("t")
    first = min((each.seconds("t") for each in agent.objects("requests")), default=0.0)
    return start if first > began / 2 else start + began


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers from 1."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        fail(str(path), f"cannot be read ({error.strerror}); check path and rights")


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        fail(str(path), f"cannot be read ({error.strerror}); check path and rights")


def _files(path: Path) -> tuple[TraceFormat, list[Path]]:
    """Return the format of a trace, and its files in order."""
    trace_format, paths = _found(path)
    for each in paths:
        _refuse_pipes(each)
    return trace_format or _format_of(path), paths


def _refuse_pipes(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # who reads it says why that cannot be done
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        fail(str(path), "is a pipe or a device, and would be read twice; write it to a file first")


def _found(path: Path) -> tuple[TraceFormat | None, list[Path]]:
    """Return the files of a trace, and their format; None: a file has to tell it."""
    try:
        if path.is_dir():
            next(path.iterdir(), None)  # a folder that may not be read is no empty one
        else:
            path.stat()
    except FileNotFoundError:
        fail(str(path), "no such file or folder; name a JSONL file or a folder of sessions")
    except OSError as error:
        fail(str(path), f"cannot be read ({error.strerror}); check path and rights")
    if path.is_dir():
        sessions, lines = sorted(path.glob("*.json")), sorted(path.glob("*.jsonl"))
        if sessions and lines:
            fail(
                str(path),
                f"holds {len(sessions)} *.json and {len(lines)} *.jsonl, which are not read "
                "together; name one JSONL file, or a folder of one kind",
            )
        if sessions:
            return TraceFormat.SESSIONS, sessions
        if len(lines) == 1:
            return TraceFormat.CONVERSATION, lines
        found = f"{len(lines)} JSONL files; name one of them" if lines else "no *.json or *.jsonl"
        fail(str(path), f"is a folder with {found}")
    return None, [path]


def _format_of(path: Path) -> TraceFormat:
    lines = _lines(path)
    number, line = next(lines, (0, b""))
    if not number:
        fail(str(path), "holds no request")
    try:
        fields: dict[str, Any] = parse_object(line.rstrip(b"\r\n"), f"{path}:{number}")
    except TraceError:
        # A line of a JSONL file is an object; only a session may go over several lines.
        if path.suffix == ".json":
            return TraceFormat.SESSIONS
        raise
    if "requests" in fields:
        if next(lines, None):
            fail(
                str(path),
                "holds a session on its first line, and more after it; write each session to a "
                "JSON file of its own, and name their folder",
            )
        return TraceFormat.SESSIONS
    if "input_length" in fields or "hash_ids" in fields or path.suffix == ".jsonl":
        return TraceFormat.CONVERSATION
    known = ", ".join(map(repr, sorted(fields))) or "nothing"
    raise TraceError(
        f"{path}:{number}: is neither a request ('timestamp', 'input_length', 'output_length', "
        f"'hash_ids') nor a session ('requests'); there is {known}"
    )
