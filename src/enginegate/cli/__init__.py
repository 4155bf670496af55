"""The ``enginegate`` command."""

from enginegate.cli.app import main

__all__ = ["main"]
