"""Predictions: what a recompute and a reload would take; pure."""
