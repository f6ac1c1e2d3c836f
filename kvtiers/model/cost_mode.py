"""How a plan uses what the cost model predicts."""

from __future__ import annotations

from enum import StrEnum


class CostMode(StrEnum):
    """The values of ``cost.mode`` in the configuration."""

    AUTO = "auto"  # reload as many leading blocks as the model finds fastest
    ALWAYS = "always"  # reload every leading block that exists
    NEVER = "never"  # reload nothing
    SHADOW = "shadow"  # reload as ALWAYS does, and record what AUTO would have done
