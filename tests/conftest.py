"""What holds for all tests."""

import pytest
from hypothesis import settings

# Assertions of the shipped suites explain themselves; before anything imports them.
pytest.register_assert_rewrite("kvtiers.testing.store_suite", "kvtiers.testing.store_machine")

# A busy machine is no error of what is tested.
settings.register_profile("without a clock", deadline=None)
settings.load_profile("without a clock")
