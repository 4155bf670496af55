"""A bucket that was edited by hand: the journal there, and each host's own log, are asked first."""

from datetime import timedelta

import pytest

from enginegate.errors import TamperedError
from enginegate.repository.store.object_release import Pointer
from tests.fakes.hosts import answer, problems


@pytest.fixture
def two(host, package):
    """Two hosts with servers in memory; release 2 is live on both."""
    one, other = host("one"), host("two")
    one.publish(package(1.0), expected=None)
    other.pull()
    one.publish(package(2.0), expected=1)
    other.pull()
    assert problems(one) + problems(other) == []
    return one, other


def point_at(host, version):
    """Edit the commit point by hand."""
    pointer, tag = host.releases.pointer()
    edited = Pointer(
        version=version,
        release=host.releases.release(version).digest,
        changed_at=pointer.changed_at + timedelta(seconds=1),
    )
    assert host.store.replace("digits/current.json", edited.pretty_json(), tag)


def test_an_edited_commit_point_is_followed_by_nobody(two):
    """Every host says so, and what serves still serves."""
    one, other = two
    point_at(one, 1)

    for host in (one, other):
        with pytest.raises(TamperedError, match="release 1 is live; the journal's last change"):
            host.pull()
        with pytest.raises(TamperedError, match="so nothing is replicated"):
            host.repair()
        assert answer(host) == (2, 2.0)


@pytest.mark.parametrize("keep", [0, 4], ids=["deleted", "cut"])
def test_a_journal_that_was_cut_to_fit_is_noticed(two, keep):
    """By the releases in storage; and by what a host followed, where those were deleted too."""
    one, other = two
    for key in one.store.keys("digits/journal/")[keep:]:
        one.store.delete(key)
    point_at(one, 1)

    with pytest.raises(TamperedError, match="ends before release 2, which was published"):
        one.pull()
    assert "ends before release 2" in "".join(problems(other))
    one.releases.remove(2)
    with pytest.raises(TamperedError, match="ends before release 2, which was published"):
        other.pull()

    assert answer(one) == answer(other) == (2, 2.0)
