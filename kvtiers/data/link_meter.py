"""What each link has moved, and for how long."""

from __future__ import annotations

from kvtiers.model.messages import Link


class LinkMeter:
    """Adds up blocks, bytes and seconds by link until they are taken."""

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}

    def add(self, name: str, num_blocks: int, nbytes: int, seconds: float) -> None:
        """Note what a link did. Blocks that did not arrive are not to be counted."""
        if not num_blocks:
            return
        so_far = self._links.get(name, Link(name, 0, 0, 0.0))
        self._links[name] = Link(
            name, so_far.num_blocks + num_blocks, so_far.nbytes + nbytes, so_far.seconds + seconds
        )

    def take(self) -> tuple[Link, ...]:
        """Return what each link did since the last call."""
        links, self._links = self._links, {}
        return tuple(links.values())
