"""Tests in real serving engines."""
