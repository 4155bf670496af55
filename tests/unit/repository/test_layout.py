"""Reading what lies in a live repository."""

import pytest

from enginegate.errors import RepositoryError
from enginegate.repository import Layout


def test_a_repository_of_an_earlier_program_is_not_taken_for_an_empty_one(tmp_path):
    """What it serves would be published over; the message says what to move."""
    (tmp_path / "digits" / ".enginegate" / "releases").mkdir(parents=True)

    with pytest.raises(RepositoryError, match=r"earlier enginegate.*Move that folder"):
        Layout(tmp_path, "digits").current()


def test_nothing_is_live_where_nothing_was_published(tmp_path):
    """An empty root, and a folder that somebody else put there."""
    (tmp_path / "other").mkdir()

    assert Layout(tmp_path, "digits").current() is None
    assert Layout(tmp_path, "other").current() is None
