"""Replacement rules: who leaves next."""

from __future__ import annotations

from kvtiers.control.policy.adaptive import RULES, Adaptive
from kvtiers.control.policy.base import EvictionPolicy
from kvtiers.control.policy.cost import Cost, Value
from kvtiers.model.errors import ConfigError

POLICIES = (*RULES, "adaptive")


def make_policy(name: str, capacity_blocks: int, value: Value | None = None) -> EvictionPolicy:
    """Return a new policy by its name in the configuration.

    Args:
        capacity_blocks: of the tier that it ranks.
        value: seconds that a reload of a block saves, for those that ask; None: all the same.

    Raises:
        ConfigError: no policy has that name; the message lists those that exist.
    """
    if name == "adaptive":
        return Adaptive(capacity_blocks, value)
    if name == "cost":
        return Cost(capacity_blocks, value)
    if name not in RULES:
        raise ConfigError(f"policy.evict: no policy {name!r}; known: {', '.join(sorted(POLICIES))}")
    return RULES[name](capacity_blocks)
