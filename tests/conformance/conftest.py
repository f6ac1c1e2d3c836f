"""Assertions of the shipped suites explain themselves."""

import pytest

pytest.register_assert_rewrite("kvtiers.testing.store_suite", "kvtiers.testing.store_machine")
