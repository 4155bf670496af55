"""A builder that runs out of disk, memory or time ends as an error; progress is told on the way."""

import json
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest

from enginegate.engines import build_engine, cuda
from enginegate.engines.tensorrt import process
from enginegate.engines.tensorrt.process import BuildJob, BuildReport, BuildStep
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
        process, "builder_command", lambda _job, _report: [sys.executable, "-c", program]
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


def test_the_monitor_cancels(plan, cnn, tmp_path):
    """When asked to stop, the builder ends in order at its next step, without a plan."""
    job = BuildJob(
        library="tensorrt_rtx",
        onnx=cnn.folder / "model.onnx",
        plan=tmp_path / "model.plan",
        profiles=plan("tensorrt-fp32").profiles,
        tf32=False,
        targets=("sm89",),
        workspace_mib=64,
        memory_mib=16384,
    )
    job = job.model_copy(update={"onnx": tmp_path / "model.onnx"})
    job.onnx.write_bytes((cnn.folder / "model.onnx").read_bytes())
    job.cancel.touch()
    (tmp_path / "job.json").write_bytes(job.canonical_json())

    command = process.builder_command(tmp_path / "job.json", tmp_path / "report.json")
    ended = subprocess.run(command, capture_output=True, check=False)

    report = BuildReport.read(tmp_path / "report.json")
    assert ended.returncode == 0
    assert report.cancelled
    assert not job.plan.exists()
    assert len([json.loads(line) for line in job.progress.read_bytes().splitlines()]) < 20
