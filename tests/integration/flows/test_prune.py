"""Pruning beside Prefect: suspended promotions are kept, and the watch prunes once a day."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
from prefect.exceptions import Pause
from prefect.settings import PREFECT_API_URL, temporary_settings

from enginegate.errors import EnginegateError
from enginegate.policy import read_policy
from enginegate.retention import PruneScope, plan_scope
from enginegate.workspace import Workspace
from flows.prune import prune_on_schedule, unfinished_runs
from tests.fakes.authentic import keep
from tests.fakes.deployed import Deployed
from tests.fakes.evidence import scorecard
from tests.fakes.family import _POLICY as POLICY
from tests.fakes.kept import age

pytestmark = pytest.mark.xdist_group("flows")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with one policy, under which nothing is live."""
    monkeypatch.setenv("ENGINEGATE_HOME", str(tmp_path / "workspace"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "policies").mkdir()
    return tmp_path


def policy(project, name="tiny", retention=""):
    path = project / "policies" / f"{name}.toml"
    text = POLICY.format(root=project).replace('name = "tiny"', f'name = "{name}"')
    path.write_text(f"{text}timeout_hours = 24\n{retention}")
    return path


def old_result(days=90):
    """A cache of the workspace that nothing refers to."""
    path = Workspace.here().results / "verdicts" / "old.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    return age(path, timedelta(days=days))


def test_suspended_promotion_keeps_its_scorecard(project, prefect_server):
    """Nobody could publish it any more but who answers that form; no process is left of it."""
    del prefect_server  # it only has to run
    path = policy(project)
    rules = read_policy(path)
    made = scorecard(model="tiny", model_uri="models:/tiny/1", policy_sha256=rules.digest)
    card = keep(made, rules, Workspace.here())
    run = Deployed(path, card.digest[:12])
    with pytest.raises(Pause):
        run.step()
    for path in (Workspace.here().root / "scorecards").iterdir():
        age(path)

    runs = unfinished_runs()
    scope = PruneScope(
        Workspace.here(),
        (),
        timedelta(days=30),
        retired=frozenset({"tiny"}),
        elsewhere=lambda: runs,
    )
    alone = PruneScope(Workspace.here(), (), timedelta(days=30), retired=frozenset({"tiny"}))

    assert card.digest[:12] in runs.scorecards
    assert [entry.kind for entry in plan_scope(scope).delete] == []
    assert [entry.kind for entry in plan_scope(alone).delete] == ["scorecard"]


def test_server_that_does_not_answer_is_no_answer():
    """Its suspended promotions are not known."""
    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        pytest.raises(EnginegateError, match="promotions are suspended"),
    ):
        unfinished_runs()


class TestSchedule:
    """The watch prunes where every policy of the project says so."""

    @pytest.fixture(autouse=True)
    def no_server(self):
        with temporary_settings(restore_defaults={PREFECT_API_URL}):
            yield

    def run(self, path):
        return prune_on_schedule(read_policy(path), Workspace.here())

    def test_once_a_day(self, project):
        path = policy(project, retention="[retention]\nunused_days = 60\n")
        old = old_result()

        (said,) = self.run(path)

        assert "nobody used for 60 days" in said
        assert not old.exists()
        old_result()
        assert self.run(path) == ()
        stamp = Workspace.here().cursors / "pruned"
        os.utime(stamp, (0, 0))
        assert len(self.run(path)) == 1

    @pytest.mark.parametrize(
        ("other", "days"),
        [
            pytest.param("", 90, id="another policy does not say so"),
            pytest.param("[retention]\nunused_days = 365\n", 90, id="another one keeps for longer"),
        ],
    )
    def test_nothing_that_another_policy_keeps(self, project, other, days):
        path = policy(project, retention="[retention]\nunused_days = 60\n")
        policy(project, "other", other)
        old = old_result(days)

        assert self.run(path) == ()
        assert old.exists()

    def test_policy_that_cannot_be_read_stops_it_and_fails_no_watch(self, project):
        path = policy(project, retention="[retention]\nunused_days = 60\n")
        Path(policy(project, "other")).write_text("name = ")
        old = old_result()

        (said,) = self.run(path)

        assert said.startswith("Nothing was pruned")
        assert old.exists()
