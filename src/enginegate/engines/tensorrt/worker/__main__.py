"""``PYTHON worker JOB.json``: does the job's command and writes its report.

Commands: ``probe`` (which library is here; never touches a device), ``build``, ``inspect`` and
``run``. A process that leaves no report died.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
from pathlib import Path

_DIE_WITH_PARENT = 1


def main(path: Path) -> None:
    """Do one job. Job: command, report (path), parent (its process id, or 0), and the command's."""
    job = json.loads(path.read_text())
    if job.get("parent"):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != job["parent"]:
            sys.exit("The process that started this one is gone.")
    folder = Path(__file__).resolve().parent
    sys.path[0] = str(folder.parent)
    sys.path.append(sys.path.pop(0))  # last, so that no file here hides a library
    command = importlib.import_module(f"{folder.name}.commands")
    report = command.COMMANDS[job["command"]](job)
    if job.get("report"):
        written = Path(f"{job['report']}.part")
        written.write_text(json.dumps(report))
        written.replace(job["report"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
