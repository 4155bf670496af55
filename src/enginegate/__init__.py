"""Enginegate: promote the exact engine bytes that passed, and nothing else."""

__version__ = "0.1.0"
