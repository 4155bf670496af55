"""Write one of the examples: model, data and policy."""

import sys
from pathlib import Path

from examples.tasks.models import EXAMPLES


def main(arguments: list[str]) -> int:
    """Write the example that is named into a folder; the exit code."""
    if len(arguments) != 2 or arguments[0] not in EXAMPLES:  # noqa: PLR2004 - task, folder
        print(f"python -m examples.tasks {{{','.join(EXAMPLES)}}} FOLDER")  # noqa: T201
        return 2
    path = EXAMPLES[arguments[0]]().write(Path(arguments[1]))
    print(f"enginegate qualify {path}")  # noqa: T201 - the next line to run
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
