"""Reading what lies in a live repository."""

import json

import pytest

from enginegate.errors import RepositoryError, TamperedError
from enginegate.repository import Layout, LiveRepository, verify

OLD = {"version": 1, "known": [1], "changed_at": "2026-01-01T00:00:00Z"}


@pytest.fixture
def older(tmp_path):
    """A repository whose pointer an earlier program wrote."""
    (tmp_path / "digits" / "00" / "releases").mkdir(parents=True)
    (tmp_path / ".enginegate-current.digits.json").write_text(json.dumps(OLD | {"audit": None}))
    return tmp_path


def test_older_format_is_refused_in_one_sentence(older):
    """The message says what to move."""
    with pytest.raises(RepositoryError, match=r"earlier enginegate's format.*promote it again"):
        Layout(older, "digits").current()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema_version": 2}', "\x00" * 100])
def test_damaged_pointer_says_how_it_is_written_again(tmp_path, content):
    """Making it again by hand is what nobody should try."""
    layout = Layout(tmp_path, "digits")
    layout.current_file.write_text(content)

    with pytest.raises(TamperedError, match=r"(?s)current.digits.json.*rollback POLICY --to N"):
        layout.current()


def test_older_manifest_is_refused(older):
    """Before anything of it is believed."""
    Layout(older, "digits").release_file(1).write_text(json.dumps({"schema_version": 1}))

    with pytest.raises(RepositoryError, match="earlier enginegate's format"):
        Layout(older, "digits").release(1)


def test_verifying_one_says_so(older):
    """What nobody can read here is no clean repository."""
    found = {check.subject: check.problem for check in verify(LiveRepository(older, None))}

    assert "earlier enginegate" in found["digits live release"]


def test_empty_repository_has_nothing_live(tmp_path):
    """An empty root, and a folder that somebody else put there."""
    (tmp_path / "other").mkdir()

    assert Layout(tmp_path, "digits").current() is None
    assert Layout(tmp_path, "other").current() is None
