"""Sizes, durations and numbers of things as people write them: ``64GiB``, ``5ms``, ``1 block``."""

from __future__ import annotations

import re
from collections.abc import Iterable
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
_NUMBER: Final = r"[0-9]{1,19}(?:\.[0-9]{1,18})?"
SIZE_PATTERN: Final = rf"^{_NUMBER} ?({'|'.join(SIZE_UNITS)})$"
DURATION_PATTERN: Final = rf"^{_NUMBER} ?({'|'.join(DURATION_UNITS)})$"
_QUANTITY: Final = re.compile(rf"({_NUMBER}) ?([A-Za-z]*)")
_BINARY: Final = ("TiB", "GiB", "MiB", "KiB")
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
    """Return the text of a size that `parse_size` reads back exactly, in binary units.

    Args:
        nbytes: bytes, 0 <= nbytes < 2**63.
    """
    for unit in _BINARY:
        if nbytes and nbytes % SIZE_UNITS[unit] == 0:
            return f"{nbytes // SIZE_UNITS[unit]}{unit}"
    return f"{nbytes}B"


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
    return parse_size(_text_with_unit(value, "size", "GiB"))


def duration_from(value: object) -> float:
    """Return the seconds that a configured value means; see `parse_duration`.

    Raises:
        ValueError: the value is no text with a unit.
    """
    return parse_duration(_text_with_unit(value, "duration", "ms"))


def _text_with_unit(value: object, noun: str, unit: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        example = f"{value}{unit}" if value > 0 else f"1{unit}"
        raise ValueError(f"{value!r} has no unit; write {example}")
    raise ValueError(f"{value!r} is not a {noun}; write 1{unit}")


def _split(text: str, units: Iterable[str], noun: str, example: str) -> tuple[str, str]:
    """Cut a quantity into its number and its unit, one of ``units``."""
    match = _QUANTITY.fullmatch(text.strip(" "))
    if match is None:
        raise ValueError(f"{text!r} is not a {noun}; write a number with a unit, such as {example}")
    number, unit = match.groups()
    units = list(units)
    if unit in units:
        return number, unit
    choices = ", ".join(units)
    if not unit:
        fallback = example.lstrip("0123456789")
        raise ValueError(f"{text!r} has no unit; write {number}{fallback} (units: {choices})")
    likely = [u for u in units if u.casefold() == unit.casefold()]
    likely = likely or [u for u in reversed(units) if u.casefold().startswith(unit.casefold())]
    hint = " or ".join(f"{number}{u}" for u in likely) or f"one of {choices}"
    raise ValueError(f"{text!r} has the unknown unit {unit!r}; write {hint}")


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
