"""Sizes, durations and numbers of things as people write them: ``64GiB``, ``5ms``, ``1 block``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Final

SIZE_UNITS: Final[dict[str, int]] = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
DURATION_UNITS: Final[dict[str, Fraction]] = {
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 10**3),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
}
_SPELT_OUT: Final[dict[str, tuple[str, ...]]] = {
    "sec": ("s",),
    "secs": ("s",),
    "second": ("s",),
    "seconds": ("s",),
    "msec": ("ms",),
    "milliseconds": ("ms",),
    "minute": ("min",),
    "minutes": ("min",),
    "hour": ("h",),
    "hours": ("h",),
    "bytes": ("B",),
}
_NUMBER: Final = r"[0-9]{1,19}(?:\.[0-9]{1,18})?"
SIZE_PATTERN: Final = rf"^{_NUMBER} ?({'|'.join(SIZE_UNITS)})$"
DURATION_PATTERN: Final = rf"^{_NUMBER} ?({'|'.join(DURATION_UNITS)})$"
_QUANTITY: Final = re.compile(rf"({_NUMBER}) ?([A-Za-z]*)")
_LARGEST_FIRST: Final = ("TiB", "TB", "GiB", "GB", "MiB", "MB", "KiB", "kB", "B")
_SURELY_BYTES: Final = 2**20  # a number without a unit from here on is hardly one of GiB
_NEGATIVE: Final = re.compile(r" *-(?=[0-9])")
_MAX_NBYTES: Final = 2**63 - 1  # what an off_t holds


def parse_size(text: str) -> int:
    """Return the bytes that a text such as ``64GiB`` or ``1.5TB`` means.

    Raises:
        ValueError: no number, no unit or an unknown one, a fraction of a byte, or more than
            2**63 - 1 bytes; the message says what to write instead.
    """
    number, unit = _split(text, SIZE_UNITS, "size", "64GiB")
    nbytes = Fraction(number) * SIZE_UNITS[unit]
    if nbytes.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number of bytes; write it in a smaller unit")
    if nbytes > _MAX_NBYTES:
        raise ValueError(f"{text!r} is more than 2**63 - 1 bytes; write a smaller size")
    return int(nbytes)


def format_size(nbytes: int) -> str:
    """Return the text of a size that `parse_size` reads back exactly, in the largest exact unit.

    Args:
        nbytes: bytes, 0 <= nbytes < 2**63.
    """
    units = (unit for unit in _LARGEST_FIRST if nbytes and nbytes % SIZE_UNITS[unit] == 0)
    unit = next(units, "B")
    return f"{nbytes // SIZE_UNITS[unit]}{unit}"


def parse_duration(text: str) -> float:
    """Return the seconds that a text such as ``5ms`` or ``2min`` means.

    Raises:
        ValueError: no number, no unit or an unknown one; the message says what to write instead.
    """
    number, unit = _split(text, DURATION_UNITS, "duration", "5ms")
    return float(Fraction(number) * DURATION_UNITS[unit])


def format_duration(seconds: float) -> str:
    """Return the text of a duration that `parse_duration` reads back exactly.

    Args:
        seconds: finite, not negative, no finer than 1e-18 s.
    """
    if seconds == 0:
        return "0s"
    for unit in ("h", "min", "s", "ms", "us"):
        count = Fraction(seconds) / DURATION_UNITS[unit]
        text = f"{round(count)}{unit}"
        if count >= 1 and parse_duration(text) == seconds:
            return text
    return f"{Decimal(repr(seconds)):f}s"


def size_from(value: object) -> int:
    """Return the bytes that a configured value means; see `parse_size`.

    Raises:
        ValueError: the value is no text with a unit.
    """
    if isinstance(value, str):
        return parse_size(value)
    if not _is_number(value):
        raise ValueError(f"{as_written(value)} is not a size; write 1GiB")
    raise ValueError(f"{value!r} has no unit; write {_size_meant(str(value))}")


def duration_from(value: object) -> float:
    """Return the seconds that a configured value means; see `parse_duration`.

    Raises:
        ValueError: the value is no text with a unit.
    """
    if isinstance(value, str):
        return parse_duration(value)
    if not _is_number(value):
        raise ValueError(f"{as_written(value)} is not a duration; write 1ms")
    raise ValueError(f"{value!r} has no unit; write {_duration_meant(str(value))}")


def as_written(value: object) -> str:
    """Return a value as its YAML file has it, in one line, cut where it is long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _size_meant(number: str) -> str:
    """Return what somebody who wrote a number without a unit may have meant."""
    value = float(number)
    if value <= 0:
        return "1GiB"
    if _SURELY_BYTES <= value <= _MAX_NBYTES:
        return f"{format_size(int(value))}, if these are bytes"
    return f"{number}GiB"


def _duration_meant(number: str) -> str:
    value = float(number)
    if value < 0:
        return "1s or 1ms"
    return f"{number}s or {number}ms" if value else "0ms"


def _split(text: str, units: Iterable[str], noun: str, example: str) -> tuple[str, str]:
    """Cut a quantity into its number and its unit, one of ``units``."""
    match = _QUANTITY.fullmatch(text.strip(" "))
    if match is None:
        wrong = "is negative" if _NEGATIVE.match(text) else f"is not a {noun}"
        raise ValueError(f"{text!r} {wrong}; write a number with a unit, such as {example}")
    number, unit = match.groups()
    units = list(units)
    if unit in units:
        return number, unit
    choices = ", ".join(units)
    if not unit:
        meant = (_size_meant if noun == "size" else _duration_meant)(number)
        raise ValueError(f"{text!r} has no unit; write {meant} (units: {choices})")
    hint = " or ".join(f"{number}{u}" for u in _likely(unit, units)) or f"one of {choices}"
    raise ValueError(f"{text!r} has the unknown unit {unit!r}; write {hint}")


def _likely(word: str, units: Sequence[str]) -> list[str]:
    """Return the units that a word may stand for: ``G``, ``gib``, ``GiBs``, ``sec``."""
    word = word.casefold()
    same = [unit for unit in units if unit.casefold() == word]
    longer = [unit for unit in reversed(units) if unit.casefold().startswith(word)]
    shorter = [unit for unit in units if len(unit) > 1 and word == f"{unit.casefold()}s"]
    return same or longer or shorter or [unit for unit in _SPELT_OUT.get(word, ()) if unit in units]


def counted(num: int, what: str) -> str:
    """Return a number of things in words.

    Args:
        what: one of them, beginning with the word that takes an s, such as ``block of 16 tokens``.
    """
    noun, *rest = what.split(" ", 1)
    return " ".join([f"{num:,}", noun if num == 1 else f"{noun}s", *rest])


def whole_mib(nbytes: int) -> str:
    """Return a size as one may write it, rounded up to whole MiB."""
    return f"{-(-nbytes // 2**20)}MiB"
