"""Engines of positioned file I/O, one small interface and a file for each."""
