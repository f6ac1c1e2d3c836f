"""Tests of `kvtiers.observe`."""
