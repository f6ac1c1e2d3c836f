"""Tests of `kvtiers.cost`."""
