"""Signatures and the audit log of a live repository, on a real Triton."""

from dataclasses import replace

import pytest

from enginegate.decision import Head
from enginegate.errors import PublishError, RepositoryError, TamperedError
from enginegate.policy.operating import Signing
from enginegate.repository import AuditLog, Layout, ReleaseSigning, verify
from enginegate.repository.history.journal import Journal
from enginegate.workspace import Workspace

pytestmark = pytest.mark.triton
add = Journal.add


@pytest.fixture
def signed(repository, tmp_path):
    """The repository of a policy that requires signatures."""
    signing = ReleaseSigning.of(Signing(required=True), Workspace(tmp_path / "workspace"))
    return replace(repository, signing=signing, channel="test")


def events(repository):
    return [(event.event, event.release) for event in AuditLog(repository.root).read()]


def problems(repository):
    return "".join(check.problem for check in verify(repository))


def test_modified_release_cannot_be_rolled_back_to(signed, package, ask):
    """Manifest and journal may be forged to fit; the signature still shows it, and names it."""
    signed.publish(package(1.0), expected=None)
    signed.publish(package(2.0), expected=1)
    assert problems(signed) == ""
    manifest = Layout(signed.root, "digits").release_file(1)
    manifest.write_bytes(manifest.read_bytes().replace(b"margins are wide", b"anything goes"))

    with pytest.raises(TamperedError, match=r"1\.sig\.json is not valid.*releases/1\.json"):
        signed.rollback("digits", reason="errors")

    assert ask() == (2, 2.0)
    assert "1.sig.json is not valid" in problems(signed)
    assert events(signed) == [("published", 1), ("published", 2), ("refused", 1)]


def test_unsigned_release_needs_policy_permission(signed, package):
    """Published before signatures were required: it must be published again."""
    loose = replace(signed, signing=None)
    loose.publish(package(1.0), expected=None)

    with pytest.raises(RepositoryError, match="not signed"):
        signed.bring_up("digits")
    assert "not signed" in problems(signed)
    lenient = replace(signed, signing=replace(signed.signing, required=False))
    assert lenient.bring_up("digits").version == 1
    assert problems(lenient) == ""
    assert any("not signed" in check.note for check in verify(lenient))


def test_failed_operation_is_audited_once(signed, package, monkeypatch):
    """The log is written before the journal closes, so recovery can tell what a kill kept back."""
    signed.publish(package(1.0), expected=None)
    with pytest.raises(PublishError):
        signed.publish(package(2.0, golden=package(3.0).golden), expected=1)

    def die(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", lambda *a, **k: die() if a[2] == "done" else add(*a, **k))
        with pytest.raises(KeyboardInterrupt):
            signed.publish(package(2.0), expected=1)
    signed.recover()
    signed.recover()

    assert events(signed) == [("published", 1), ("refused", 2), ("published", 3)]
    assert problems(signed) == ""
    assert Head.read(AuditLog(signed.root).head_file) == AuditLog(signed.root).head()


def test_shortened_audit_log_is_reported_and_edited_log_stops_changes(signed, package, ask):
    """The commit point, the signed releases and the journal know how far it had come."""
    signed.publish(package(1.0), expected=None)
    AuditLog(signed.root).tell("repaired", "digits", why="loaded and proved", release=1)
    log = AuditLog(signed.root).path
    whole = log.read_bytes()

    log.write_bytes(whole.splitlines(keepends=True)[0])
    assert "has 1 line;" in problems(signed)
    log.write_bytes(whole.replace(b"margins", b"profits"))
    assert "line 2: the chain is broken" in problems(signed)

    with pytest.raises(TamperedError, match="line 2"):
        signed.rollback("digits")
    assert ask() == (1, 1.0)
