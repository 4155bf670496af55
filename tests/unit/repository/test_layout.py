"""Reading what lies in a live repository."""

import pytest

from enginegate.errors import RepositoryError
from enginegate.repository import Layout


@pytest.mark.parametrize("pointer", [False, True], ids=["in-the-model", "in-the-root"])
def test_a_repository_of_an_earlier_program_is_not_taken_for_an_empty_one(tmp_path, pointer):
    """What it serves would be published over; the message says what to move."""
    (tmp_path / "digits" / ".enginegate" / "releases").mkdir(parents=True)
    if pointer:
        (tmp_path / ".enginegate-current.digits.json").write_text("{}")

    with pytest.raises(RepositoryError, match=r"earlier enginegate.*Move that folder"):
        Layout(tmp_path, "digits").current()


def test_nothing_is_live_where_nothing_was_published(tmp_path):
    """An empty root, and a folder that somebody else put there."""
    (tmp_path / "other").mkdir()

    assert Layout(tmp_path, "digits").current() is None
    assert Layout(tmp_path, "other").current() is None
