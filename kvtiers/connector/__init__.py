"""The engine-neutral interface: one small class on each side of an engine."""
