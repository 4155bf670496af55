"""A live release that is given another promise: journalled, signed, and kept with the release."""

import json
from dataclasses import replace
from datetime import timedelta

import pytest

from enginegate.decision import Promise, RenewedPromise
from enginegate.errors import InputError, PublishError, RepositoryError, TamperedError
from enginegate.repository import AuditLog, Layout, ReleaseSigning, verify
from enginegate.repository.history.journal import JOURNAL, Journal
from enginegate.repository.recovery import Withdrawal
from enginegate.repository.rollout.fleet import Fleet
from enginegate.workspace import now
from tests.fakes.evidence import sha

PROMISE = Promise(p99_ms=4.0, throughput_per_s=900.0, slo_p99_ms=10.0)


class _KilledError(BaseException):
    """Stands for a kill: nothing is cleaned up after it."""


def renewal(release, scorecard="d", **changes):
    fields = {
        "model": release.model,
        "version": release.version,
        "release_sha256": release.digest,
        "scorecard_sha256": sha(scorecard),
        "promise": PROMISE,
        "decision": release.decision.model_copy(
            update={"approver": "grace", "reason": "the SLO is stricter now"}
        ),
        "renewed_at": now(),
    }
    return RenewedPromise(**(fields | changes))


def problems(target):
    return [check.problem for check in verify(target) if check.problem]


@pytest.fixture
def release(repository, package):
    return repository.publish(package(1.0), expected=None)


@pytest.fixture
def layout(repository):
    return Layout(repository.root, "digits")


@pytest.fixture
def signing(tmp_path):
    return ReleaseSigning(required=True, private_key=None, public_key=None, keys=tmp_path / "keys")


def test_the_live_release_is_held_to_another_promise(repository, layout, release, server):
    """Nothing is loaded, its manifest and digest stay, and the audit log says on whose word."""
    given, calls = renewal(release), []
    server.load = lambda *_, **__: calls.append("load")

    assert repository.renew(given) == given

    held = layout.held_to(release)
    assert (held.promise, held.scorecard_sha256) == (PROMISE, sha("d"))
    assert held.decision.approver == "grace"
    assert layout.release(1) == release
    assert calls == []
    event = AuditLog(repository.root).read()[-1]
    assert (event.event, event.release, event.scorecard) == ("promised", 1, sha("d"))
    assert event.why == "grace: the SLO is stricter now"
    assert problems(repository) == []


def test_it_stays_with_the_release(repository, layout, release, package):
    """Through a promotion and the way back; another release has its own."""
    repository.renew(renewal(release))
    second = repository.publish(package(2.0), expected=1)
    assert layout.held_to(second).promise == second.promise

    repository.rollback("digits")

    assert layout.held_to(release).promise == PROMISE
    assert problems(repository) == []
    with pytest.raises(RepositoryError, match="enginegate withdraw"):
        repository.rollback("digits")
    repository.withdraw("digits", Withdrawal("ada", "not needed"))
    assert problems(repository) == []


def test_the_same_scorecard_again_changes_nothing(repository, layout, release):
    """And a third scorecard replaces the second."""
    first = repository.renew(renewal(release))

    assert repository.renew(renewal(release, renewed_at=now() + timedelta(hours=1))) == first
    third = repository.renew(renewal(release, "e", replaces=first.digest))

    assert layout.renewed(1) == third
    assert problems(repository) == []


@pytest.mark.parametrize("change", [{"version": 2}, {"release_sha256": sha("0")}])
def test_only_the_live_release_is_given_one(repository, layout, release, change):
    """Another number, or another manifest of that number: nothing is written."""
    with pytest.raises((RepositoryError, TamperedError)):
        repository.renew(renewal(release, **change))

    assert layout.renewed(1) is None
    assert Journal(repository.root).unfinished() == ()
    assert list(layout.release_file(1).parent.glob("*promise*")) == []


def test_killed_on_the_way_it_is_the_old_promise_or_the_new(
    repository, layout, release, monkeypatch
):
    """The commit point decides, as it does for what is live."""

    def killed(*_, **__):
        raise _KilledError

    for patched, committed in [("Change.sign", False), ("AuditLog.close", True)]:
        with monkeypatch.context() as patch:
            patch.setattr(f"enginegate.repository.promotion.{patched}", killed)
            patch.setattr(
                "enginegate.repository.recovery.OperationRecovery.end", lambda *_, **__: ""
            )
            with pytest.raises(_KilledError):
                repository.renew(renewal(release))
        (said,) = problems(repository)
        assert "A promise of digits release 1 was cut short" in said
        (said,) = repository.recover()
        assert "A promise of digits release 1 was cut short" in said
        assert (layout.renewed(1) is not None) is committed
        assert bool(list(layout.release_file(1).parent.glob("*promise*"))) is committed
        assert problems(repository) == []
        assert layout.current().version == 1


def test_unwritable_promise_is_undone(repository, layout, release, monkeypatch):
    """And said."""

    def full(*_, **__):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("enginegate.repository.promotion.Change.sign", full)
        with pytest.raises(PublishError, match=r"(?s)No space.*the promise that it had"):
            repository.renew(renewal(release))

    assert layout.renewed(1) is None
    assert AuditLog(repository.root).read()[-1].event == "refused"
    assert problems(repository) == []


@pytest.mark.parametrize("edit", ["promise", "gone", "commit point", "back"])
def test_edited_promise_is_detected(repository, layout, release, edit):
    """Loosened, removed, or left out of the commit point, so that the first one counts again."""
    given = repository.renew(renewal(release))
    path = layout.promise_file(1, given.digest)
    if edit == "promise":
        path.write_text(path.read_text().replace("4.0", "400.0"))
    elif edit == "gone":
        path.unlink()
    else:
        current = json.loads(layout.current_file.read_text())
        current["promises"] = {} if edit == "back" else {"1": sha("0")}
        layout.current_file.write_text(json.dumps(current))

    assert any("promise" in said for said in problems(repository))
    if edit != "back":
        with pytest.raises((TamperedError, InputError)):
            layout.held_to(release)


def test_edited_commit_point_gets_no_promise(repository, layout, release, package):
    """The release that it names is not live by either record; writing it would confirm it."""
    repository.publish(package(2.0), expected=1)
    edited = layout.current().model_copy(update={"version": 1, "standby": None})
    layout.current_file.write_bytes(edited.pretty_json())

    with pytest.raises(TamperedError, match="says that release 1 is live"):
        repository.renew(renewal(release))

    assert layout.renewed(1) is None


def test_journal_cut_before_a_promise_is_reported(repository, layout, release):
    """And the commit point set back to fit: the audit log has the promise that was given."""
    path, before = repository.root / JOURNAL, layout.current().promises
    kept = path.read_bytes()
    repository.renew(renewal(release))
    path.write_bytes(kept)
    edited = layout.current().model_copy(update={"promises": before})
    layout.current_file.write_bytes(edited.pretty_json())

    (said,) = problems(repository)

    assert f"{path} was cut: it lacks an operation on digits release 1" in said
    assert "'promised'" in said


def test_it_is_signed_where_releases_are(repository, layout, package, signing):
    """A required signature that is gone, or another promise's, is refused like a release's."""
    signed = replace(repository, signing=signing)
    release = signed.publish(package(1.0), expected=None)
    given = signed.renew(renewal(release))
    signature = layout.promise_signature(1, given.digest)
    assert signature.is_file()
    assert problems(signed) == []
    signed.publish(package(2.0), expected=1)

    content = signature.read_bytes()
    signature.write_bytes(layout.signature_file(1).read_bytes())
    assert any("is not valid" in said for said in problems(signed))
    signature.unlink()
    assert any("the promise of release 1 of digits is not signed" in s for s in problems(signed))
    with pytest.raises(RepositoryError, match="is not signed"):
        signed.rollback("digits")
    signature.write_bytes(content)

    assert signed.rollback("digits").version == 1


def test_fleet_promise_is_read_from_the_primary(repository, layout, release):
    """The watch reads it there."""
    Fleet(repository, ()).renew(renewal(release))

    assert layout.held_to(release).promise == PROMISE
