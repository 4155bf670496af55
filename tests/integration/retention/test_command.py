"""`enginegate prune` on a project in use: shown first, deleted when somebody says so."""

import json
import re
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from enginegate.cli.app import app
from enginegate.errors import EnginegateError, ExitCode
from enginegate.retention import plan_scope, prune_scope
from tests.fakes.kept import UNUSED, KeptProject, age

ROOT = Path(__file__).parents[3]


@pytest.fixture
def project(tmp_path):
    """Two releases, an engine that nothing names, and a cache; all months old."""
    made = KeptProject(tmp_path)
    made.publish(1.0, 2.0)
    made.engine(b"nobody's")
    made.cached()
    text = (ROOT / "policies" / "digits.toml").read_text()
    policy = re.sub(r'repository = ".*"', f'repository = "{made.live}"', text)
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "digits.toml").write_text(policy)
    (tmp_path / "pyproject.toml").touch()
    return made


@pytest.fixture
def prune(project, monkeypatch):
    """Run the command in the project's folder, without a terminal."""
    monkeypatch.chdir(project.root)
    monkeypatch.setenv("ENGINEGATE_HOME", str(project.workspace.root))

    def run(*options):
        return CliRunner().invoke(app, ["prune", *options])

    return run


def test_without_a_terminal_it_only_shows_and_with_yes_it_deletes(project, prune):
    """What is referred to is there afterwards."""
    shown = prune()
    assert shown.exit_code == ExitCode.OK, shown.output
    assert "To delete it: enginegate prune --yes" in shown.output
    assert re.search(r"its release is live +engine +1 ", shown.output)
    assert len(list(project.workspace.engines.glob("*/model.onnx"))) == 3

    done = prune("--yes", "--json")

    document = json.loads(done.stdout)
    assert {(e["kind"], e["state"]) for e in document["entries"]} == {
        ("engine", "deleted"),
        ("result", "deleted"),
    }
    assert document["freed_bytes"] == document["size_bytes"] > 0
    engines = project.workspace.engines.glob("*/model.onnx")
    assert {path.read_bytes() for path in engines} == {b"1.0", b"2.0"}


def test_server_of_prefect_that_does_not_answer_is_a_refusal(project, prune):
    """It may hold a suspended promotion."""
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        done = prune("--yes")

    assert isinstance(done.exception, EnginegateError)
    assert "127.0.0.1:9" in str(done.exception)
    assert len(list(project.workspace.engines.glob("*/model.onnx"))) == 3


def test_run_that_is_under_way_keeps_what_was_used_after_it_began(project):
    """Also where somebody prunes what is an hour old; a run that was killed counts no more."""
    code = (
        "import sys, time; from pathlib import Path\n"
        "from enginegate.retention import running\n"
        "from enginegate.workspace import Workspace, now\n"
        "from datetime import timedelta\n"
        "running.now = lambda: now() - timedelta(days=200)\n"
        "with running.marked_as_running(Workspace(Path(sys.argv[1])), 'qualify'):\n"
        "    print('begun', flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code, str(project.workspace.root)]
    scope = project.scope(unused_for=timedelta(hours=1))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout.readline() == "begun\n"
        assert plan_scope(scope).delete == ()
        run.send_signal(signal.SIGKILL)
        run.wait()

    assert len(plan_scope(scope).delete) == 2
    assert list((project.workspace.root / "running").iterdir()) == []


def test_run_that_is_about_a_scorecard_keeps_all_it_names(project):
    from enginegate.retention import marked_as_running

    card = project.scorecard(project.engine(b"outdated"), replaces=None, reason="asked again")
    scope = project.scope(unused_for=UNUSED)
    age(project.workspace.root / "scorecards" / f"{card.digest}.json")

    with marked_as_running(project.workspace, "promote", card.digest[:12]):
        prune_scope(scope, plan_scope(scope))

    engines = project.workspace.engines.glob("*/model.onnx")
    assert b"outdated" in {path.read_bytes() for path in engines}
