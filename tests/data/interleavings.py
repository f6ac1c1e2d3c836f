"""Every order in which host, engine, copies and executor can take their turns."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Protocol, TypeVar


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


class StatefulPlay(Play, Protocol):
    """A scenario whose future depends on nothing but its state."""

    @property
    def state(self) -> Hashable:
        """All that later turns may depend on."""
        ...


Stateful = TypeVar("Stateful", bound=StatefulPlay)


def endings(start: Callable[[], Stateful]) -> Iterator[Stateful]:
    """Yield the scenario in every state where nobody can take a turn any more.

    Orders that lead to one state go on as one, so that all of them are followed to their end.
    """
    seen: set[Hashable] = set()
    paths: list[tuple[int, ...]] = [()]

    def play_of(path: tuple[int, ...]) -> Stateful | None:
        play = start()
        return play if all([play.moves[choice]() for choice in path]) else None  # noqa: C419

    while paths:
        path = paths.pop()
        ended = True
        for choice in range(len(start().moves)):
            play = play_of((*path, choice))
            if play is None:
                continue
            ended = False
            if play.state not in seen:
                seen.add(play.state)
                paths.append((*path, choice))
        if ended:
            play = play_of(path)
            assert play is not None
            yield play
