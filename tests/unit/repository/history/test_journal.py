"""The journal: what was under way survives, and edits show."""

import pytest

from enginegate.errors import TamperedError
from enginegate.repository.history.journal import JOURNAL, Journal


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path)


def test_operation_is_unfinished_until_done_or_undone(journal):
    """Recovery sees exactly the operations that were cut short, at their last step."""
    first = journal.open("publish", "digits", 1)
    journal.add(first, "done")
    second = journal.open("publish", "digits", 2)
    journal.add(second, "placed")

    (found,) = journal.unfinished()

    assert (found.operation, found.step, found.version) == (second.operation, "placed", 2)


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_torn_last_line_is_dropped(journal, cut):
    """The entries before it stand, and the next entry goes in its place."""
    entry = journal.open("publish", "digits", 1)
    journal.add(entry, "placed")
    (journal.root / JOURNAL).write_bytes((journal.root / JOURNAL).read_bytes()[:-cut])

    assert [e.step for e in journal.read()] == ["intent"]
    journal.add(entry, "configured")
    assert [e.step for e in journal.read()] == ["intent", "configured"]


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda lines: [lines[0].replace(b'"version":1', b'"version":9'), *lines[1:]]),
        pytest.param(lambda lines: [lines[0], *lines[2:]]),
        pytest.param(lambda lines: [lines[1], lines[0], lines[2]]),
        pytest.param(lambda lines: [lines[0], b"nonsense", *lines[1:]]),
    ],
    ids=["changed", "removed", "swapped", "added"],
)
def test_edited_entry_breaks_the_chain(journal, edit):
    """Whatever was changed, the message names the line."""
    entry = journal.open("publish", "digits", 1)
    journal.add(entry, "placed")
    journal.add(entry, "done")
    lines = (journal.root / JOURNAL).read_bytes().splitlines()
    (journal.root / JOURNAL).write_bytes(b"\n".join(edit(lines)) + b"\n")

    with pytest.raises(TamperedError, match=r"journal\.jsonl, line [123]"):
        journal.read()
