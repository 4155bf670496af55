"""`status` of many models: what changed is shown at once, and only what did not is not read."""

import os
import re
from pathlib import Path

import pytest

from enginegate.cli.live import status, status_record
from enginegate.cli.live.status import status_of
from enginegate.evidence import Outcome
from enginegate.policy import read_policy
from enginegate.repository import AuditLog, Layout, LiveRepository
from enginegate.repository.history.broken_promises import record_broken
from enginegate.repository.store.pointer import after_rollback, commit
from enginegate.watch.log import WatchLog
from enginegate.workspace import Workspace
from tests.fakes.evidence import decision, finding, scorecard, sha
from tests.fakes.live_triton import FakeTriton, package_in
from tests.fakes.watch_checks import watch_check

ROOT = Path(__file__).parents[4]


class Project:
    """A policy in whose repository release 2 is live, and its workspace."""

    def __init__(self, root: Path) -> None:
        self.live, self.policy = root / "live", root / "policies" / "digits.toml"
        self.live.mkdir()
        triton = FakeTriton(self.live)
        repository = LiveRepository(self.live, triton, load_timeout_s=1.0)
        repository.publish(package_in(root, 1.0), expected=None)
        repository.publish(package_in(root, 2.0), expected=1)
        self.policy.parent.mkdir()
        text = (ROOT / "policies" / "digits.toml").read_text()
        self.policy.write_text(re.sub(r'repository = ".*"', f'repository = "{self.live}"', text))
        self.workspace = Workspace(root / ".enginegate")
        self.workspace.root.mkdir()
        self.layout = Layout(self.live, "digits")

    @property
    def record(self) -> Path:
        return self.workspace.root / "verified" / "status.json"

    def card(self):
        """A scorecard that waits for a decision."""
        rules = read_policy(self.policy)
        return scorecard(policy_sha256=rules.with_model("models:/digits/1").digest, replaces=2)


def edit_in_place(path, before, after):
    """As long as before, and with the times that it had; only the time of change tells."""
    seen = path.stat()
    content = path.read_bytes()
    assert before in content
    assert len(before) == len(after)
    with path.open("r+b") as file:
        file.write(content.replace(before, after, 1))
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))


def shown(project):
    """What a list of models shows of it."""
    found = status_of([project.policy], brief=True)
    kept = {"words", "state", "broken", "waiting", "problems"}
    return [each.model_dump(include=kept) for each in found.document.models], found.document.errors


@pytest.fixture
def parsed(monkeypatch):
    """The policies that were parsed."""
    paths = []

    def counted(path):
        paths.append(path)
        return read_policy(path)

    monkeypatch.setattr(status, "read_policy", counted)
    return paths


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.delenv("ENGINEGATE_HOME", raising=False)
    # Files that were written a moment ago count as settled: each change here gets its own time.
    monkeypatch.setattr(status_record, "_SETTLED_NS", -3_600_000_000_000)
    return Project(tmp_path)


CHANGES = {
    "a key of the policy": lambda p: edit_in_place(p.policy, b"p99_ms = ", b"p99_mx = "),
    "the live pointer": lambda p: commit(p.layout, after_rollback(p.layout.current(), 1)),
    "the pointer is gone": lambda p: p.layout.current_file.unlink(),
    "the live manifest": lambda p: edit_in_place(p.layout.release_file(2), b'"', b"'"),
    "an older manifest": lambda p: edit_in_place(p.layout.release_file(1), b'"', b"'"),
    "an older manifest is gone": lambda p: p.layout.release_file(1).unlink(),
    "a broken promise in the log": lambda p: record_broken(
        p.live, watch_check(finding(Outcome.FAILED, gate="p99_ms"), version=2)
    ),
    "the log is cut": lambda p: os.truncate(AuditLog(p.live).path, 0),
    "the log is damaged": lambda p: edit_in_place(AuditLog(p.live).path, b'"', b"'"),
    "a failed check that no log has": lambda p: WatchLog.at(p.workspace, p.layout.release(2)).add(
        watch_check(finding(Outcome.FAILED, gate="p99_ms"), version=2)
    ),
    "a scorecard": lambda p: p.workspace.save_scorecard(p.card()),
    "a scorecard that cannot be read": lambda p: (
        p.workspace.scorecard_file(p.card()).parent.joinpath(f"{sha('7')}.json").write_text("{}")
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen_at_once(project, parsed, change):
    (project.workspace.root / "scorecards").mkdir()
    before = shown(project)
    parsed.clear()
    assert shown(project) == before
    assert not parsed

    change(project)
    found = shown(project)
    assert parsed or found != before
    project.record.unlink()

    assert found == shown(project)


def test_a_decision_on_a_waiting_scorecard_is_seen_and_ages(project, parsed):
    """Approvals expire, so that a scorecard with one is judged anew each time."""
    card = project.card()
    project.workspace.save_scorecard(card)
    (waits,) = shown(project)[0]
    parsed.clear()
    assert shown(project)[0] == [waits]
    assert not parsed
    assert [each["state"] for each in waits["waiting"]] == ["waits for a decision"]

    project.workspace.save_decision(decision(card))

    (answered,) = shown(project)[0]
    assert answered["waiting"] != waits["waiting"]
    parsed.clear()
    shown(project)
    assert parsed


def test_a_changed_scorecard_is_named_each_time(project):
    path = project.workspace.save_scorecard(project.card())
    shown(project)
    edit_in_place(path, b"models:/digits/1", b"models:/digits/9")

    first, again = shown(project), shown(project)

    assert first == again
    assert "was changed after it was written" in first[1][0]


def test_files_that_changed_a_moment_ago_are_read_again(project, parsed, monkeypatch):
    """Two changes within one tick of the clock have one time."""
    monkeypatch.setattr(status_record, "_SETTLED_NS", 3_600_000_000_000)
    shown(project)
    parsed.clear()
    shown(project)

    assert parsed


@pytest.mark.parametrize("forged", [b"", b"{}", b"0" * 64 + b"\n{}"])
def test_a_record_without_its_seal_counts_for_nothing(project, parsed, forged):
    before = shown(project)
    project.record.write_bytes(forged)
    parsed.clear()

    assert shown(project) == before
    assert parsed


def test_an_edited_record_counts_for_nothing(project, parsed):
    before = shown(project)
    edit_in_place(project.record, b"live: release 2", b"live: release 7")
    parsed.clear()

    assert shown(project) == before
    assert parsed


def test_another_program_reads_everything_again(project, parsed, monkeypatch):
    before = shown(project)
    parsed.clear()
    monkeypatch.setattr(status_record, "_depends", lambda: "another version")

    assert shown(project) == before
    assert parsed


def test_an_event_of_another_model_changes_nothing(project, parsed):
    shown(project)
    failed = watch_check(finding(Outcome.FAILED, gate="p99_ms"), version=2)
    record_broken(project.live, failed.model_copy(update={"model": "other"}))
    parsed.clear()

    shown(project)

    assert not parsed


def test_all_of_one_model_is_read_each_time(project, parsed):
    """`--json` and `status POLICY` show releases, servers and measurements."""
    shown(project)
    parsed.clear()
    found = status_of([project.policy]).document

    assert parsed
    assert [each.release for each in found.models[0].releases] == [2, 1]
