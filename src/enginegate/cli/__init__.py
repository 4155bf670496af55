"""The ``enginegate`` command."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command; Ctrl-C while it is still being loaded is no traceback either."""
    try:
        from enginegate.cli.app import run_command  # noqa: PLC0415 - it takes a second
    except KeyboardInterrupt:
        if sys.stderr is not None:
            sys.stderr.write("\nInterrupted. Nothing was begun.\n")
        sys.exit(130)
    run_command()
