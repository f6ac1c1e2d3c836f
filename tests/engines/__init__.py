"""Tests of `kvtiers.engines`."""
