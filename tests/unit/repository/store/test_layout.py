"""Reading what lies in a live repository."""

import pytest

from enginegate.errors import RepositoryError
from enginegate.repository import Layout, LiveRepository, verify


@pytest.mark.parametrize("pointer", [False, True], ids=["in-the-model", "in-the-root"])
def test_a_repository_of_an_earlier_program_is_not_taken_for_an_empty_one(tmp_path, pointer):
    """What it serves would be published over; the message says what to move."""
    (tmp_path / "digits" / ".enginegate" / "releases").mkdir(parents=True)
    if pointer:
        (tmp_path / ".enginegate-current.digits.json").write_text("{}")

    with pytest.raises(RepositoryError, match=r"earlier enginegate.*Move that folder"):
        Layout(tmp_path, "digits").current()


def test_verifying_one_says_so(tmp_path):
    """What nobody can read here is no clean repository."""
    (tmp_path / "digits" / ".enginegate" / "releases").mkdir(parents=True)

    found = {check.subject: check.problem for check in verify(LiveRepository(tmp_path, None))}

    assert "earlier enginegate" in found["digits live release"]


def test_nothing_is_live_where_nothing_was_published(tmp_path):
    """An empty root, and a folder that somebody else put there."""
    (tmp_path / "other").mkdir()

    assert Layout(tmp_path, "digits").current() is None
    assert Layout(tmp_path, "other").current() is None
