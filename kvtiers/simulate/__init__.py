"""Traces of requests, replayed through a modelled engine and the real control plane."""
