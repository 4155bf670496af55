"""A builder that runs out of disk, memory or time ends as an error; progress is told on the way."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from enginegate.engines import build_engine, cuda
from enginegate.engines.tensorrt import process
from enginegate.engines.tensorrt.library import find_library, worker_command
from enginegate.engines.tensorrt.process import BuildStep
from enginegate.engines.tensorrt.table import TensorRtTable, builder_settings
from enginegate.errors import BuildError, EnginegateError

pytestmark = [pytest.mark.rtx, pytest.mark.xdist_group("engines")]
pytest.importorskip("tensorrt_rtx")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """These tests mean the same on a machine that has a GPU."""
    monkeypatch.setattr(cuda, "gpu", lambda: None)


@pytest.fixture
def full_disk(tmp_path):
    """A file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs more rights than we have")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture
def small_files():
    """No file may grow beyond 24 KiB, as on a disk that fills up; for child processes, too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (24 * 1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def left_in(folder):
    return [path.name for path in folder.iterdir() if path.suffix != ".lock"]


@pytest.mark.parametrize("name", ["tensorrt-fp32", "onnxruntime-fp32"])
def test_full_disk_leaves_nothing(plan, full_disk, name):
    """An engine that does not fit on the disk is an error that says so, and no half of it stays."""
    (full_disk / "filler").write_bytes(bytes(56 * 1024))

    with pytest.raises(EnginegateError, match=r"No space left on device(.|\n)*[Ff]ree space"):
        build_engine(plan(name), full_disk / "engines")

    assert left_in(full_disk / "engines") == []


@pytest.mark.usefixtures("small_files")
def test_plan_that_cannot_be_written_is_refused(plan, tmp_path):
    """The builder's own write fails in its process; the error names the size and what to do."""
    with pytest.raises(BuildError, match=r"plan of \d+ bytes cannot be written: File too large"):
        build_engine(plan("tensorrt-fp32"), tmp_path)

    assert left_in(tmp_path) == []


def test_the_kernels_kill_is_explained(plan, tmp_path, monkeypatch):
    """SIGKILL from outside is what the kernel does when memory is used up."""
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setattr(
        process, "worker_command", lambda _python, _job: [sys.executable, "-c", program]
    )

    with pytest.raises(BuildError, match=r"killed by SIGKILL(.|\n)*lower memory_mib = 16384"):
        build_engine(plan("tensorrt-fp16"), tmp_path)

    assert left_in(tmp_path) == []


def test_steps_reach_the_caller(plan, store, monkeypatch):
    """The builder's own progress monitor tells phases and steps while it works."""
    told = []
    monkeypatch.setattr(process, "log_progress", lambda _plan: told.append)
    settings = {"targets": ["sm86"]}

    build_engine(plan("tensorrt-fp32", tensorrt=settings), store / "engines")

    assert len(told) > 3
    assert all(isinstance(step, BuildStep) and step.step <= step.steps for step in told)
    assert len({step.phase for step in told}) > 1


def test_progress_is_logged_in_moderation(plan, monkeypatch, caplog):
    """A line every two seconds, with the candidate, the phase and the step."""
    times = iter([0.0, 0.5, 2.5, 2.5, 3.0])
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: next(times)))
    caplog.set_level("INFO", logger="enginegate.build")

    tell = process.log_progress(plan("tensorrt-fp16"))
    for step in (1, 2, 3):
        tell(BuildStep(phase="Timing", step=step, steps=9))

    assert caplog.messages == ["tensorrt-fp16: Timing, step 2 of 9"]


@pytest.fixture
def job(plan, cnn, tmp_path):
    """A job for the stand-alone program, with the CNN's ONNX in a scratch folder."""
    planned, library = plan("tensorrt-fp32"), find_library("tensorrt_rtx")
    model = tmp_path / "model.onnx"
    model.write_bytes((cnn.folder / "model.onnx").read_bytes())
    settings = builder_settings(library, planned.candidate.precision, TensorRtTable())
    made = process.build_job(
        planned, library, settings, model, tmp_path / "model.plan", targets=("sm89",)
    )
    return made | {"report": str(tmp_path / "report.json")}


def written(job, folder):
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    return worker_command(sys.executable, path)


def test_the_program_stands_alone(job, tmp_path):
    """It builds a plan in an interpreter that cannot import Enginegate."""
    command = written(job, tmp_path)
    blocked = "import sys, runpy; sys.modules['enginegate'] = None; sys.argv = sys.argv[1:]; "
    blocked += "sys.path.insert(0, ''); runpy.run_path(sys.argv[0], run_name='__main__')"

    subprocess.run([sys.executable, "-c", blocked, *command[1:]], check=True, capture_output=True)

    report = json.loads((tmp_path / "report.json").read_text())
    assert report["error"] == ""
    assert report["weighted"] == {"fp32": 3}
    assert (tmp_path / "model.plan").read_bytes()[:4] == b"vtrt"


def test_the_monitor_cancels(job, tmp_path):
    """When asked to stop, the builder ends in order at its next step, without a plan."""
    (tmp_path / "cancel").touch()

    ended = subprocess.run(written(job, tmp_path), capture_output=True, check=False)

    report = json.loads((tmp_path / "report.json").read_text())
    assert ended.returncode == 0
    assert report["cancelled"]
    assert not (tmp_path / "model.plan").exists()
    assert len((tmp_path / "progress.jsonl").read_text().splitlines()) < 20


def test_killed_builder_leaves_nothing(plan, tmp_path, monkeypatch):
    """A builder that is killed at its first step leaves neither a plan nor half of one."""
    # Servers that other tests share are children of this process too.
    others, killed = set(children_of(os.getpid())), []

    def kill(_plan):
        def tell(_step):
            if not killed:
                killed.append(next(c for c in children_of(os.getpid()) if c not in others))
                os.kill(killed[0], signal.SIGKILL)

        return tell

    monkeypatch.setattr(process, "log_progress", kill)

    with pytest.raises(BuildError, match="killed by SIGKILL"):
        build_engine(plan("tensorrt-fp32", tensorrt={"targets": ["sm80"]}), tmp_path)

    assert killed
    assert left_in(tmp_path) == []


def children_of(pid):
    """Processes that this one started."""
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
