"""Where flows come from, what is told before Prefect starts, and what it may not tell later."""

import logging
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from typer.testing import CliRunner

from enginegate import pipeline
from enginegate.cli import approve
from enginegate.cli.app import app
from enginegate.errors import EnginegateError, InputError, PolicyError

_ROOT = Path(__file__).parents[3]
_DIGITS = str(_ROOT / "policies" / "digits.toml")


@pytest.mark.parametrize(
    "command",
    [
        ["qualify", "absent.toml"],
        ["qualify", _DIGITS, "--model", "../digits"],
        ["promote", "absent.toml", "d3e7"],
        ["watch", "absent.toml"],
        ["scan", "absent.toml"],
    ],
)
def test_policy_error_is_found_before_prefect_starts(monkeypatch, command):
    """It takes ten seconds to start, and keeps a failed run of what was a typing error."""

    def start(name):
        raise AssertionError(f"{name} was started")

    for module in ("app", "live.release", "live.watch"):
        monkeypatch.setattr(f"enginegate.cli.{module}.pipeline_module", start)

    assert isinstance(CliRunner().invoke(app, command).exception, PolicyError)


def test_prefect_does_not_count_its_events_on_the_terminal(monkeypatch):
    """It does so while the process ends; what goes wrong there is told still."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(pipeline, "_PREFECT", {})
    monkeypatch.setattr(pipeline, "importlib", SimpleNamespace(import_module=ModuleType))
    flows = ModuleType("flows")  # the real one takes seconds to import
    flows.__file__ = str(_ROOT / "flows" / "__init__.py")
    flows.__path__ = [str(_ROOT / "flows")]
    monkeypatch.setitem(sys.modules, "flows", flows)
    loggers = [logging.getLogger(name) for name in ("EventsWorker", "APILogWorker")]
    for logger in loggers:
        monkeypatch.setattr(logger, "level", logging.NOTSET)
    logging.getLogger().manager._clear_cache()

    pipeline.pipeline_module("flows.answer")

    assert not any(logger.isEnabledFor(logging.WARNING) for logger in loggers)
    assert all(logger.isEnabledFor(logging.ERROR) for logger in loggers)


def test_flows_are_found_from_any_folder_and_before_a_namesake(tmp_path):
    """A project may have a folder ``tasks`` of its own."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "__init__.py").touch()
    program = (
        "from enginegate.pipeline import open_pipeline; open_pipeline()\n"
        "import tasks, validation; print(tasks.__file__)"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )

    assert Path(done.stdout.strip()) == _ROOT / "tasks" / "__init__.py"


@pytest.mark.parametrize("as_package", [True, False])
def test_imported_namesake_is_refused(monkeypatch, tmp_path, as_package):
    """Its modules would be taken for Enginegate's, or the other way round."""
    other = ModuleType("tasks")
    if as_package:
        other.__path__ = [str(tmp_path / "tasks")]
    else:
        other.__file__ = str(tmp_path / "tasks.py")
    monkeypatch.setitem(sys.modules, "tasks", other)

    with pytest.raises(InputError, match=rf"package 'tasks' of its own \({tmp_path}.* --json"):
        pipeline.open_pipeline()


def test_installation_without_flows_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(pipeline, "__file__", str(tmp_path / "a" / "b" / "c" / "__init__.py"))

    with pytest.raises(EnginegateError, match=r"holds flows/qualify\.py"):
        pipeline.open_pipeline()


def test_worker_enters_the_project(monkeypatch, tmp_path):
    """A policy's relative path starts there, whatever folder the worker was started in."""
    monkeypatch.chdir("/")
    monkeypatch.setattr(sys, "path", list(sys.path))

    assert pipeline.enter_project(str(tmp_path)) == {"directory": str(tmp_path)}

    assert Path.cwd() == tmp_path
    assert str(_ROOT) in sys.path


def test_worker_without_the_project_says_so(tmp_path):
    with pytest.raises(InputError, match=r"no folder \S+absent on this worker"):
        pipeline.enter_project(str(tmp_path / "absent"))


def test_no_other_module_of_the_library_opens_a_flow():
    """import-linter does not see an import by name."""
    by_name = re.compile(r"(?<!pipeline_module\()[\"'](?:flows|tasks|validation|examples)\.\w")
    library = _ROOT / "src" / "enginegate"
    others = [path for path in library.rglob("*.py") if path.parent.name != "pipeline"]

    assert len(others) > 200
    assert [path for path in others if by_name.search(path.read_text())] == []


def test_approval_in_any_folder_resumes_what_waits(monkeypatch, tmp_path):
    """The promotion waits on the Prefect server, wherever the answer is given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    opened = []

    def door(name):
        opened.append(name)
        return SimpleNamespace(resume_suspended=lambda decision: (decision,))

    monkeypatch.setattr(approve, "pipeline_module", door)

    assert approve._resume_suspended("the answer") == ("the answer",)
    assert opened == ["flows.answer"]
