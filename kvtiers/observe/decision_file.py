"""Reading a log of decisions, one that is being written or has broken lines included."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvtiers.model.errors import ConfigError

MAX_NAMED: Final = 20  # broken lines that are named; all are counted


@dataclass(frozen=True, slots=True)
class LoggedDecision:
    """One line of the log.

    Versions differ in what they write: a number that is not there is None, a mapping empty.

    Attributes:
        line: its number, from 1. fields: as written, those that this version does not know too.
        num_hit_blocks: tier to leading blocks found there. predicted_seconds: by alternative.
        outcome: empty while there is none.
    """

    line: int
    request_id: str
    reason: str
    fields: Mapping[str, Any]
    num_hit_blocks: Mapping[str, int]
    predicted_seconds: Mapping[str, float]
    outcome: Mapping[str, Any]

    @property
    def num_chosen_blocks(self) -> int:
        """Blocks to reload; 0 means recompute."""
        return int(_number(self.fields.get("num_chosen_blocks")) or 0)

    @property
    def block_size(self) -> int | None:
        """Tokens of a block."""
        return int(_number(self.fields.get("block_size")) or 0) or None

    @property
    def mode(self) -> str:
        """As in ``cost.mode``; "" if not said."""
        return str(self.fields.get("mode") or "")

    @property
    def time(self) -> float | None:
        """Of the writer's clock."""
        return _number(self.fields.get("time"))

    def count(self, name: str) -> int | None:
        """Return a whole number of the line, such as ``num_tokens``."""
        value = _number(self.fields.get(name))
        return None if value is None else int(value)

    @property
    def num_loaded_blocks(self) -> int:
        """Of the blocks chosen."""
        return int(_number(self.outcome.get("num_loaded_blocks")) or 0)

    @property
    def num_failed_blocks(self) -> int:
        """Of the blocks chosen."""
        return int(_number(self.outcome.get("num_failed_blocks")) or 0)

    @property
    def load_seconds(self) -> float | None:
        """What the reload took, where it brought everything."""
        return None if self.num_failed_blocks else _number(self.outcome.get("measured_seconds"))

    @property
    def ttft_seconds(self) -> float | None:
        """What the first token took."""
        return _number(self.outcome.get("ttft_seconds"))


@dataclass(frozen=True, slots=True)
class BrokenLine:
    """A line that is no decision, and why."""

    line: int
    why: str


class DecisionFile:
    """Iterates over the decisions of a log, in the order written, without keeping them.

    A last line that has no end yet is being written: it is no broken one.

    Args:
        path: of the JSONL file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_broken = 0
        self.broken: list[BrokenLine] = []

    def __iter__(self) -> Iterator[LoggedDecision]:
        """Read the file from its start.

        Raises:
            ConfigError: it cannot be read.
        """
        self.num_broken, self.broken = 0, []
        try:
            with self.path.open("rb") as file:
                for line, text in enumerate(file, 1):
                    if not text.strip():
                        continue
                    try:
                        yield parse_decision(line, text)
                    except ValueError as error:
                        if text.endswith(b"\n"):
                            self._note(line, str(error))
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read: {error.strerror}") from error

    def _note(self, line: int, why: str) -> None:
        self.num_broken += 1
        if len(self.broken) < MAX_NAMED:
            self.broken.append(BrokenLine(line, why))


def parse_decision(line: int, text: bytes | str) -> LoggedDecision:
    """Return the decision of a line.

    Raises:
        ValueError: it is none; says why.
    """
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"a {type(fields).__name__}, not an object")
    request_id, reason = fields.get("request_id"), fields.get("reason")
    if not isinstance(request_id, str) or not isinstance(reason, str):
        raise ValueError("no 'request_id' and 'reason' that are text")
    hits = {name: int(value) for name, value in _numbers(fields, "num_hit_blocks").items()}
    outcome = fields.get("outcome") or {}
    if not isinstance(outcome, dict):
        raise ValueError(f"'outcome' is a {type(outcome).__name__}, not an object")
    seconds = _numbers(fields, "predicted_seconds")
    return LoggedDecision(line, request_id, reason, fields, hits, seconds, outcome)


def _numbers(fields: Mapping[str, Any], name: str) -> dict[str, float]:
    """Return the numbers of a mapping within the line, without those that are null."""
    value = fields.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{name!r} is a {type(value).__name__}, not an object")
    found = {str(key): _number(item) for key, item in value.items()}
    return {key: number for key, number in found.items() if number is not None}


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer that no float holds
        return None
