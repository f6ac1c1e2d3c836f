"""Tests of `kvtiers.control`."""
