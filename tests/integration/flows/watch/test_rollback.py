"""Rollbacks that the watch makes, and the withdrawal of a first release."""

import re

import pytest
from typer.testing import CliRunner

from enginegate.cli.app import app
from enginegate.errors import ExitCode, RepositoryError
from enginegate.evidence import Outcome
from enginegate.policy import read_policy
from enginegate.repository import (
    AuditLog,
    open_target,
)
from enginegate.tracking import Tracker
from enginegate.triton.endpoint import live_client
from enginegate.watch.log import WatchCheck, WatchLog
from enginegate.workspace import Workspace, now
from flows.rollback import rollback
from flows.watch import _acted, watch
from flows.withdraw import withdraw
from tasks.watch import RolledBack, deliver_to_mlflow, roll_back_failed
from tests.fakes.watched import broken, edited, release_of, visitors
from validation.live import live_finding

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("flows")]


def slow_look(release):
    """One that the policy answers with a rollback."""
    return WatchCheck(
        model="tiny",
        version=release.version,
        release_sha256=release.digest,
        number=1,
        at=now(),
        intensive=True,
        reading=None,
        findings=(live_finding("server_time", Outcome.FAILED, "slow"),),
        action="rollback",
    )


def test_rollback_alerts_before_the_registry_changes(released, monkeypatch, alerts):
    """Whatever happens to MLflow or to this process then, people were told."""
    rules, live = read_policy(released), release_of(released)

    def killed(*_):
        raise InterruptedError

    monkeypatch.setattr("flows.watch.roll_back_failed", lambda *_: RolledBack(live, "It is live."))
    monkeypatch.setattr("flows.watch.update_mlflow", killed)
    with pytest.raises(InterruptedError):
        _acted(rules.live_tables, live, slow_look(live), Workspace.of(rules))

    assert [alert["action"] for alert in alerts()] == ["rollback"]


def test_only_the_release_that_failed_is_rolled_back(released, monkeypatch, alerts):
    """Somebody promotes while the watch decides: theirs stays, which is said and no alert."""
    rules, failed = read_policy(released), release_of(released)
    real = open_target(rules.live_tables, Workspace.here())
    asked = []

    class Faster:
        """Another operator's rollback comes first."""

        def rollback(self, model, to, **options):
            asked.append(options.get("expected"))
            real.rollback("tiny", 1, reason="somebody else")
            return real.rollback(model, to, **options)

    monkeypatch.setattr("tasks.watch.open_target", lambda *_, **__: Faster())
    monkeypatch.setattr("flows.watch.roll_back_failed", roll_back_failed.fn)
    try:
        acted = _acted(rules.live_tables, failed, slow_look(failed), Workspace.of(rules))
        assert release_of(released).version == 1
    finally:
        real.rollback("tiny", failed.version, reason="as it was")

    assert (asked, acted.action) == ([failed.version], "none")
    assert alerts() == []


def test_dead_fleet_server_does_not_silence_a_rollback(
    released, tmp_path, family, monkeypatch, alerts
):
    """The others went back, which is what is alerted, with the dead one named; and told MLflow."""
    path = edited(released, tmp_path / "p.toml")
    path.write_text(f'{path.read_text()}\n[[target.fleet]]\nname = "b"\nendpoint = "127.0.0.1:1"\n')
    rules, failed = read_policy(path), release_of(released)
    monkeypatch.setattr("flows.watch.roll_back_failed", roll_back_failed.fn)
    checks = WatchLog.at(Workspace.here(), failed)
    try:
        acted = _acted(rules.live_tables, failed, slow_look(failed), Workspace.of(rules))
        assert (release_of(released).version, checks.rolled_back) == (1, True)
    finally:
        checks.return_claim()
        alone = open_target(read_policy(released).live_tables, Workspace.here())
        alone.rollback("tiny", failed.version, reason="as it was")

    assert acted.action == "rollback"
    (alert,) = alerts()
    assert (alert["release"], alert["action"]) == (2, "rollback")
    assert re.search(
        r"(?s)1 of tiny is live again on the primary, but not.*b: No live", alert["why"]
    )
    tracker = Tracker(family.workspace.tracking_uri, family.workspace.artifacts)
    assert tracker.alias("tiny", "champion") == 1


def test_slower_release_is_rolled_back_once(released, tmp_path, family, alerts, monkeypatch):
    """The reason is in the audit log, `champion` follows, and it happens once a release."""
    rules = edited(
        released,
        tmp_path / "p.toml",
        ("p99_over_promise = 1000", 'p99_over_promise = 1e-6\non_failure = "rollback"'),
    )
    root = read_policy(rules).target.repository
    tracker = Tracker(family.workspace.tracking_uri, family.workspace.artifacts)
    with visitors(released):
        (check,), said = broken(rules)

        assert "It was rolled back: release 1 is live again." in said
        assert (check.outcome, check.action) == (Outcome.FAILED, "rollback")
        assert release_of(released).version == 1
        assert tracker.alias("tiny", "champion") == 1
        noted, last = AuditLog(root).read()[-2:]
        assert (noted.event, noted.release, noted.check) == ("promise broken", 2, check.number)
        assert (last.event, last.release) == ("rolled back", 1)
        assert "check" in last.why
        assert "server_time" in last.why
        assert "watch" in last.origin
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////proc/nowhere/mlflow.db")
        (first,), _ = broken(rules)
        rollback(rules, 2)
        (again,), _ = broken(rules)
    waiting = CliRunner().invoke(app, ["acknowledge", str(rules), "--reason", "a test"]).output
    assert [waiting.count(f"release {number} broke") for number in (1, 2)] == [1, 2]

    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    opened = read_policy(released)
    updated = deliver_to_mlflow.fn(opened.live_tables, Workspace.of(opened))
    assert any("champion" in sentence for sentence in updated)
    assert (first.version, first.outcome, first.action) == (1, Outcome.FAILED, "alert")
    assert (again.version, again.outcome, again.action) == (2, Outcome.FAILED, "alert")
    assert release_of(released).version == 2
    assert [(a["release"], a["action"]) for a in alerts()] == [
        (2, "rollback"),
        (1, "alert"),
        (2, "alert"),
    ]


def test_first_release_is_withdrawn(released, family):
    """The last test that has one: nothing serves, the alias stands for nothing, `status` says why.

    The release before the live one is what to go back to, so that is asked for instead.
    """
    tracker = Tracker(family.workspace.tracking_uri, family.workspace.artifacts)
    why = ["--approver", "ada", "--reason", "it answers nonsense"]
    terminal = CliRunner()
    with pytest.raises(RepositoryError, match="enginegate rollback POLICY"):
        withdraw(released, "it answers nonsense", "ada")
    rollback(released)
    refused = terminal.invoke(app, ["rollback", str(released)]).exception
    assert "enginegate withdraw POLICY --reason WHY" in str(refused)
    without = terminal.invoke(app, ["withdraw", str(released), "--reason", " "]).exception
    assert without.exit_code is ExitCode.BAD_INPUT
    assert tracker.alias("tiny", "champion") == 1

    done = terminal.invoke(app, ["withdraw", str(released), *why])

    assert done.exit_code == 0, (done.output, done.exception)
    assert "Nothing is live" in done.output
    assert tracker.alias("tiny", "champion") is None
    assert "by ada" in tracker.version_tags("tiny", 1)["enginegate.withdrawn"]
    with live_client(read_policy(released).target) as client:
        assert not client.model_ready("tiny")
    status = terminal.invoke(app, ["status", str(released)]).output
    assert "nothing is live; release 1 was withdrawn by ada at " in status
    assert "it answers nonsense" in status
    assert terminal.invoke(app, ["verify", str(released)]).exit_code == 0
    assert watch(released, 0.0).checks == ()
