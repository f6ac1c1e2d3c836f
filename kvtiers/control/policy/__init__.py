"""Replacement rules: who leaves next."""

from __future__ import annotations

from collections.abc import Callable

from kvtiers.control.policy.base import EvictionPolicy
from kvtiers.control.policy.lru import LRU
from kvtiers.model.errors import ConfigError

_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LRU}


def make_policy(name: str) -> EvictionPolicy:
    """Return a new policy by its name in the configuration.

    Raises:
        ConfigError: no policy has that name; the message lists those that exist.
    """
    if name not in _POLICIES:
        raise ConfigError(
            f"policy.evict: no policy {name!r}; known: {', '.join(sorted(_POLICIES))}"
        )
    return _POLICIES[name]()
