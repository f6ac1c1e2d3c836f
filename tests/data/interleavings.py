"""Every order in which host, engine, copies and executor can take their turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol


class Play(Protocol):
    """A scenario with several actors, started afresh for every order of turns."""

    @property
    def moves(self) -> tuple[Callable[[], object], ...]:
        """One function an actor; it takes a turn, and returns something false if it cannot."""
        ...


def plays(start: Callable[[], Play], max_turns: int) -> Iterator[Play]:
    """Yield the scenario after every order of up to `max_turns` turns, each order once.

    A turn in which an actor could do nothing is no turn, which keeps the tree small.
    """
    paths: list[tuple[int, ...]] = [()]
    while paths:
        path = paths.pop()
        play = start()
        if all(play.moves[choice]() for choice in path):
            if len(path) < max_turns:
                paths += [(*path, choice) for choice in range(len(play.moves))]
            yield play
