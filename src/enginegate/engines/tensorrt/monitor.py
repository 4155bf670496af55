"""How far a TensorRT builder is, and how it is stopped: its own progress monitor."""

import threading
from pathlib import Path
from typing import Any

from enginegate.engines.tensorrt.job import BuildJob, BuildStep


def progress_monitor(trt: Any, job: BuildJob) -> Any:
    """A monitor that writes steps to ``job.progress`` and stops when ``job.cancel`` exists.

    The base class belongs to the library that was chosen, so the class is made here.
    """
    recorder = _Recorder(job.progress)

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, _parent: str | None, num_steps: int) -> None:
            recorder.begin(phase_name, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            recorder.write(phase_name, step + 1)
            return not job.cancel.exists()

        def phase_finish(self, phase_name: str) -> None:
            recorder.end(phase_name)

    return Monitor()


class _Recorder:
    """Appends steps to a file, from whichever threads the builder uses."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._steps: dict[str, int] = {}

    def begin(self, phase: str, steps: int) -> None:
        self._steps[phase] = steps
        self.write(phase, 0)

    def end(self, phase: str) -> None:
        self.write(phase, self._steps.get(phase, 0))

    def write(self, phase: str, step: int) -> None:
        steps = self._steps.get(phase, 0)
        line = BuildStep(phase=phase, step=step, steps=max(steps, step)).canonical_json() + b"\n"
        with self._lock, self._path.open("ab") as file:
            file.write(line)
