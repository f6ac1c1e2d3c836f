"""Values of a trace, checked one by one: an error names the file, the place and the remedy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from kvtiers.model.errors import KVTiersError

MOST_SECONDS: Final = 1e12
"""The latest time of a trace: 30,000 years, so that sums of times are finite."""

_PACKED: Final = {b"\x1f\x8b": "gzip", b"(\xb5/\xfd": "zstd", b"PK\x03\x04": "zip", b"BZh": "bzip2"}


class TraceError(KVTiersError):
    """A trace cannot be read; the message names the file, the line and the field."""


def fail(place: str, text: str) -> NoReturn:
    """Raise a TraceError that says where."""
    raise TraceError(f"{place}: {text}")


def parse_object(text: str | bytes, place: str) -> dict[str, Any]:
    """Return the JSON object that a text holds."""
    packed = next((name for magic, name in _PACKED.items() if _begins(text, magic)), None)
    if packed is not None:
        fail(place, f"is packed with {packed}; unpack it first")
    try:
        value = json.loads(text)
    except UnicodeDecodeError as error:
        fail(place, f"is not UTF-8 (byte {error.start})")
    except json.JSONDecodeError as error:
        at = f"column {error.colno}"
        if error.lineno > 1:
            at = f"line {error.lineno}, {at}"
        fail(place, f"is no JSON: {error.msg.removesuffix(' at')} at {at}")
    except (RecursionError, ValueError) as error:
        fail(place, f"is no JSON that can be read: {error}")
    if not isinstance(value, dict):
        more = "; write its objects to a JSONL file, one a line" if isinstance(value, list) else ""
        fail(place, f"holds {_kind(value)}, not an object{more}")
    return value


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object of a trace.

    Attributes:
        place: of the object: the file, and the line or the path within.
    """

    values: Mapping[str, Any]
    place: str

    def whole(self, name: str, least: int) -> int:
        """Return an integer of at least so much."""
        value = self._present(name)
        if type(value) is not int:
            self._wrong(name, value, f"an integer of at least {least}")
        if value < least:
            self._wrong(name, value, f"an integer of at least {least}")
        return int(value)

    def seconds(self, name: str, per_second: float = 1.0) -> float:
        """Return a time of at least 0, in seconds; `per_second`: of the unit it is written in."""
        value = self._present(name)
        unit = "seconds" if per_second == 1.0 else "milliseconds"
        most = MOST_SECONDS * per_second
        if type(value) not in (int, float) or not 0 <= value <= most:
            self._wrong(name, value, f"a number of {unit}, at least 0 and at most {most:g}")
        return float(value) / per_second

    def optional_seconds(self, name: str) -> float | None:
        """Return a time in seconds; None where it is absent or null."""
        return None if self.values.get(name) is None else self.seconds(name)

    def ids(self, name: str, num_tokens: int, block_size: int) -> list[int]:
        """Return the identifiers of a prompt's blocks, the last of which may be a part."""
        value = self._present(name)
        if not isinstance(value, list):
            self._wrong(name, value, "a list of integers")
        for idx, found in enumerate(value):
            if type(found) is not int:
                self._wrong(f"{name}[{idx}]", found, "an integer")
        least, most = num_tokens // block_size, -(-num_tokens // block_size)
        if not least <= len(value) <= most:
            expected = f"{most}" if least == most else f"{least} or {most}"
            fail(
                self.place,
                f"{name!r} has {len(value)} entries; {num_tokens} tokens in blocks of "
                f"{block_size} have {expected}",
            )
        return value

    def objects(self, name: str) -> Sequence[Fields]:
        """Return a list of objects, each with its place."""
        value = self._present(name)
        if not isinstance(value, list):
            self._wrong(name, value, "a list of objects")
        found = []
        for idx, entry in enumerate(value):
            place = f"{self.place}: {name}[{idx}]"
            if not isinstance(entry, dict):
                fail(place, f"is {_kind(entry)}, not an object")
            found.append(Fields(entry, place))
        return found

    def _present(self, name: str) -> Any:
        if name not in self.values:
            known = ", ".join(map(repr, sorted(map(str, self.values)))) or "nothing"
            fail(self.place, f"{name!r} is missing; there is {known}")
        return self.values[name]

    def _wrong(self, name: str, value: Any, right: str) -> NoReturn:
        text = json.dumps(value, ensure_ascii=False)
        shown = text if len(text) <= 40 else text[:37] + "..."
        fail(self.place, f"{name!r} is {shown}, not {right}")


def _begins(text: str | bytes, magic: bytes) -> bool:
    return isinstance(text, bytes) and text.startswith(magic)


def _kind(value: object) -> str:
    names = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "an object")
