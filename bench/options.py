"""What the options of a bench may be: told at once, not by a traceback after minutes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def at_least(least: int) -> Callable[[str], int]:
    """Return a type of option: a whole number that is not below another."""

    def number(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        return int(text)

    return number


def scratch(text: str) -> Path:
    """Return a folder of the bench's own below a folder that is there; what lies there stays."""
    above = Path(text)
    if not above.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no folder; make it, on the disk to measure")
    return above / "kvtiers-bench"
