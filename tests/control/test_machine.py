"""State machines over the deciding plane."""

from __future__ import annotations

from hypothesis import settings

from kvtiers.testing.machine import TierMachine

TestTier = TierMachine.TestCase
TestTier.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
