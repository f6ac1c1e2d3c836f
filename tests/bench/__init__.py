"""Tests of `kvtiers.bench`."""
