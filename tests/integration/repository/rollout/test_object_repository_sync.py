"""What a host's audit log says of releases that another host decided on."""

import pytest

from enginegate.errors import PublishError, RepositoryError
from enginegate.repository import AuditLog
from enginegate.repository.history.audit import live_changes, undelivered_changes
from enginegate.repository.store.object_release import ObjectReleases


def told(host):
    """What this host has to tell others of."""
    return [
        (c.kind, c.before, c.after) for c in undelivered_changes(AuditLog(host.root).read(), None)
    ]


@pytest.mark.triton
def test_only_the_host_that_decided_tells_of_it(here, there, package):
    """The other one has every change in its own log, as one that it followed."""
    here.publish(package(1.0), expected=None)
    there.pull()
    here.publish(package(2.0), expected=1)
    there.pull()
    here.rollback("digits", reason="complaints")
    there.pull()

    assert told(here) == [("published", None, 1), ("published", 1, 2), ("rolled back", 2, 1)]
    assert told(there) == []
    followed = live_changes(AuditLog(there.root).read())
    assert [change.after for change in followed] == [1, 2, 1]

    there.rollback("digits", 2, reason="they were wrong")
    here.pull()

    assert told(there) == [("rolled back", 1, 2)]
    assert len(told(here)) == 3


@pytest.mark.triton
def test_withdrawal_elsewhere_is_not_told_here(here, there, package):
    """Also where nothing is live after it."""
    here.publish(package(1.0), expected=None)
    there.pull()
    here.roll_back_promotion("digits", 1)

    assert there.pull() is None

    assert [kind for kind, _, _ in told(here)] == ["published", "withdrawn"]
    assert told(there) == []


@pytest.mark.triton
def test_uncommitted_release_is_told_with_its_rollback(here, package, monkeypatch):
    """It was live here for a moment, and no other host's log knows of it."""
    here.publish(package(1.0), expected=None)

    def refuse(*_):
        raise RepositoryError("storage is away")

    with monkeypatch.context() as patch:
        patch.setattr(ObjectReleases, "commit", refuse)
        with pytest.raises(PublishError, match="storage is away"):
            here.publish(package(2.0), expected=1)

    assert told(here)[1:] == [("published", 1, 2), ("rolled back", 2, 1)]
