"""What a real Prefect server knows of releases, also of those that it did not see."""

import time
from datetime import timedelta
from uuid import UUID, uuid4

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from enginegate.errors import RepositoryError
from enginegate.policy import read_policy
from enginegate.repository import AuditLog
from enginegate.repository.history.audit import Cursor
from enginegate.workspace import Workspace, now
from flows.watch import watch
from tasks.release_events import announce_releases
from tests.fakes import told
from tests.fakes.family import _POLICY as POLICY

pytestmark = pytest.mark.xdist_group("flows")


@pytest.fixture
def rules(prefect_server, tmp_path, monkeypatch):
    """A policy whose repository has a log; its model's name is this test's own."""
    del prefect_server  # it only has to run
    monkeypatch.setenv("ENGINEGATE_HOME", str(tmp_path / "workspace"))
    path = tmp_path / "policy.toml"
    name = f"model-{uuid4().hex[:8]}"
    path.write_text(POLICY.format(root=tmp_path).replace('name = "tiny"', f'name = "{name}"'))
    found = read_policy(path)
    found.target.repository.mkdir()
    return found


@pytest.fixture
def log(rules):
    """Two releases and the way back."""
    made = AuditLog(rules.target.repository, channel="command")
    made.tell("published", rules.name, why="ada: margins are wide", release=1)
    made.tell("published", rules.name, why="ada: better still", release=2)
    made.tell("rolled back", rules.name, why="complaints", release=1)
    return made


def kept(rules, count):
    return told.kept(rules.target.repository, rules.name, count)


def position(rules):
    return Cursor.of(Workspace.here(), PREFECT_API_URL.value(), rules.target.repository).read()


def test_missed_change_is_delivered_later(rules, log):
    """When it happened, by whom and why, and where it stands in the audit log."""
    dead = {PREFECT_API_URL: "http://127.0.0.1:9/api", PREFECT_CLIENT_MAX_RETRIES: 0}
    with temporary_settings(dead):
        assert announce_releases.fn(rules.target.repository, Workspace.of(rules)) == ()

    said = announce_releases.fn(rules.target.repository, Workspace.of(rules))

    assert len(said) == 3
    assert said[-1].endswith(f"release 1 is live of {rules.name} after 2 (rolled back).")
    events, lines = kept(rules, 3), log.read()
    assert [event.event.rpartition(".")[2] for event in events] == [
        "published",
        "published",
        "rolled-back",
    ]
    assert [event.occurred for event in events] == [line.at for line in lines]
    assert events[-1].payload == {
        "model": rules.name,
        "from": 2,
        "to": 1,
        "who": lines[-1].who,
        "why": "complaints",
        "origin": lines[-1].origin,
        "scorecard": None,
        "audit": f"3:{log.head().sha256}",
    }


def test_event_is_delivered_once(rules, log, monkeypatch):
    """Also when the workspace is lost, or another worker's: the server keeps one of each."""
    announce_releases.fn(rules.target.repository, Workspace.of(rules))
    kept(rules, 3)
    assert announce_releases.fn(rules.target.repository, Workspace.of(rules)) == ()
    assert position(rules) == log.head()

    sent = sent_by(monkeypatch)
    monkeypatch.setenv("ENGINEGATE_HOME", str(rules.target.repository.parent / "another"))
    assert announce_releases.fn(rules.target.repository, Workspace.of(rules)) == ()
    log.tell("published", rules.name, why="ada: again", release=3)
    assert len(announce_releases.fn(rules.target.repository, Workspace.of(rules))) == 1

    assert [event.payload["to"] for event in kept(rules, 4)] == [1, 2, 1, 3]
    assert len(sent) == 1


def sent_by(monkeypatch, *, lost=False):
    """Ids of the events that are sent from now on; ``lost``: the server dies with them."""
    request, sent = SyncPrefectClient.request, []

    def watched(self, method, path, **options):
        if path == "/events":
            sent.extend(UUID(event["id"]) for event in options["json"])
            if lost:
                return None
        return request(self, method, path, **options)

    monkeypatch.setattr(SyncPrefectClient, "request", watched)
    return sent


def test_event_lost_by_a_dying_server_is_sent_again(rules, log, monkeypatch):
    """It said that it had it; until it shows it, the position stays."""
    del log  # it only has to be there
    with monkeypatch.context() as patch:
        lost = sent_by(patch, lost=True)
        announce_releases.fn(rules.target.repository, Workspace.of(rules))
    assert len(lost) == 3
    assert position(rules) is None

    announce_releases.fn(rules.target.repository, Workspace.of(rules))

    assert [event.id for event in kept(rules, 3)] == lost


def test_events_beyond_retention_are_not_sent(rules, log, monkeypatch):
    """It keeps a week; an automation for what happened last month helps nobody."""
    later = now() + timedelta(days=8)
    with monkeypatch.context() as patch:
        patch.setattr("tasks.release_events.now", lambda: later)
        assert announce_releases.fn(rules.target.repository, Workspace.of(rules)) == ()
    assert position(rules) == log.head()

    log.tell("published", rules.name, why="ada: again", release=3)
    assert len(announce_releases.fn(rules.target.repository, Workspace.of(rules))) == 1

    assert [event.payload["to"] for event in kept(rules, 1)] == [3]


def test_the_watch_tells_after_it_has_looked(rules, log, monkeypatch):
    """A server that does not answer delays no check; what it found is no reason not to tell."""
    del log  # it only has to be there
    sent, sent_before = sent_by(monkeypatch), []

    def verify(*_):
        sent_before.extend(sent)
        return ("something is wrong",)

    monkeypatch.setattr("flows.watch.verify_live", verify)
    with pytest.raises(RepositoryError, match="something is wrong"):
        watch(rules.target.repository.parent / "policy.toml", 0.0)

    assert sent_before == []
    assert len(sent) >= 3


def test_delivery_in_progress_is_not_waited_for(rules, log, caplog):
    """The next run tells what the other one had not read."""
    del log  # it only has to be there
    address = PREFECT_API_URL.value()
    begun_s = time.monotonic()
    with Cursor.of(Workspace.here(), address, rules.target.repository).exclusive():
        assert announce_releases.fn(rules.target.repository, Workspace.of(rules)) == ()

    assert time.monotonic() - begun_s < 30.0
    assert "the next run sends it" in caplog.text
    assert len(announce_releases.fn(rules.target.repository, Workspace.of(rules))) == 3


def test_without_a_server_nobody_is_told(rules, log):
    """A server inside this process would be gone with it; a later one is told everything."""
    del log  # it only has to be there
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        assert announce_releases.fn(rules.target.repository, Workspace.of(rules)) == ()

    assert len(announce_releases.fn(rules.target.repository, Workspace.of(rules))) == 3
