"""Replacement rules: who leaves next."""
