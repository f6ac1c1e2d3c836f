"""Hypothesis without a clock: a busy machine is no error of the cost model."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("without a clock", deadline=None)
settings.load_profile("without a clock")
