"""Shipped test doubles and conformance suites for stores, policies and engines."""
