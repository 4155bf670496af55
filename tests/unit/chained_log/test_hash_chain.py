"""A long log is read by its index, and every edit of it shows all the same."""

import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from enginegate.chained_log import hash_chain, line_index
from enginegate.errors import TamperedError
from enginegate.repository import AuditLog
from enginegate.repository.history.journal import Journal


@pytest.fixture(params=["short", "long"])
def size(request, monkeypatch):
    """Both ways of reading must say the same: as a whole, and by an index."""
    if request.param == "long":
        monkeypatch.setattr(hash_chain, "INDEXED_FROM", 1)
    return request.param


@pytest.fixture
def long(monkeypatch):
    monkeypatch.setattr(hash_chain, "INDEXED_FROM", 1)


@pytest.fixture
def log(tmp_path):
    """Four events of two models."""
    made = AuditLog(tmp_path)
    for number, model in enumerate(("a", "b", "a", "b"), start=1):
        made.tell("refused", model, why=f"reason {number}", release=number)
    return made


@pytest.mark.usefixtures("size")
def test_lines_of_one_model(log):
    """As they were written, whoever opens the log."""
    again = AuditLog(log.root)

    assert [event.why for event in again.of("b")] == ["reason 2", "reason 4"]
    assert [event.why for event in again.read()] == [f"reason {n}" for n in (1, 2, 3, 4)]
    assert again.read()[-1].why == "reason 4"
    assert [event.sequence for event in again.read()[1:3]] == [1, 2]
    assert again.tally() == {("a", "refused"): 2, ("b", "refused"): 2}
    assert again.extents() == {"a": (2, 2), "b": (2, 3)}
    again.check()


@pytest.mark.usefixtures("size")
def test_two_writers_take_turns(log):
    """Each finds what the other has written, and the chain holds."""
    other = AuditLog(log.root)
    other.tell("refused", "a", why="reason 5")
    log.tell("refused", "b", why="reason 6")

    AuditLog(log.root).check()
    assert [event.why for event in other.of("b")][-1] == "reason 6"


@pytest.mark.usefixtures("size")
def test_unfinished_operations_are_found_without_reading_all(tmp_path):
    """At their last step, across models."""
    journal = Journal(tmp_path)
    done, cut = journal.open("publish", "a", 1), journal.open("publish", "b", 1)
    journal.add(cut, "placed")
    journal.add(done, "done")

    (found,) = Journal(tmp_path).unfinished()

    assert (found.model, found.step) == ("b", "placed")
    assert Journal(tmp_path).models() == {"a", "b"}


@pytest.mark.usefixtures("size")
def test_torn_end_is_written_over(log):
    """A crash left half a line: it says nothing, and the next event takes its place."""
    with log.path.open("ab") as file:
        file.write(b'{"at":"20')

    log.tell("refused", "a", why="reason 5")

    assert [event.why for event in AuditLog(log.root).of("a")][-1] == "reason 5"
    AuditLog(log.root).check()


@pytest.mark.usefixtures("long")
def test_edit_shows_whatever_the_index_says(log):
    """Of the same length, with the old time of modification: the time of change tells."""
    AuditLog(log.root).read()
    before = log.path.stat()
    content = log.path.read_bytes().replace(b"reason 2", b"reason 9")
    log.path.write_bytes(content)
    os.utime(log.path, ns=(before.st_atime_ns, before.st_mtime_ns))

    with pytest.raises(TamperedError, match="line 3: the chain is broken"):
        AuditLog(log.root).read()


@pytest.mark.usefixtures("long")
@pytest.mark.parametrize("damage", ["removed", "cut", "link", "nonsense"])
def test_lost_index_is_written_again(log, tmp_path_factory, damage):
    """Nothing is known only from it."""
    AuditLog(log.root).read()
    index = log.path.with_name(".enginegate-audit-index.db")
    assert index.is_file()
    if damage == "cut":
        index.write_bytes(index.read_bytes()[:100])
    elif damage == "nonsense":
        index.write_bytes(b"no database" * 100)
    else:
        index.unlink()
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "file"
    elsewhere.write_bytes(b"somebody's")
    if damage == "link":
        index.symlink_to(elsewhere)

    assert len(AuditLog(log.root).of("a")) == 2

    assert index.is_file()
    assert not index.is_symlink()
    assert elsewhere.read_bytes() == b"somebody's"


@pytest.mark.usefixtures("long")
def test_index_that_names_another_line_is_refused(log):
    """Somebody edited the index alone: a line says itself what it is."""
    AuditLog(log.root).read()
    index = log.path.with_name(".enginegate-audit-index.db")
    with sqlite3.connect(index) as edited:
        edited.execute("update line set model = 'b' where sequence = 0")

    with pytest.raises(TamperedError, match="line 1 is not the line that its index has"):
        AuditLog(log.root).of("b")

    again = AuditLog(log.root)
    again.check_all()
    assert len(again.of("b")) == 2


@pytest.mark.usefixtures("long")
@pytest.mark.parametrize("why", ["read by another", "full"])
def test_line_that_the_index_could_not_take_in_is_not_lost(log, monkeypatch, why):
    """Neither for the writer, nor for others, nor after its next line was taken in."""
    monkeypatch.setattr(line_index, "_BUSY_S", 0.0)
    writer = AuditLog(log.root)
    writer.read()
    with closing(sqlite3.connect(log.path.with_name(".enginegate-audit-index.db"))) as other:
        if why == "full":
            refuse = "begin select raise(abort, 'full'); end"
            other.executescript(f"create trigger full before insert on line {refuse}")
        else:
            other.execute("begin exclusive")
        writer.tell("refused", "a", why="reason 5")
    assert [event.why for event in writer.of("a")] == ["reason 1", "reason 3", "reason 5"]

    writer.tell("refused", "a", why="reason 6")

    assert [event.why for event in AuditLog(log.root).of("a")][-2:] == ["reason 5", "reason 6"]
    assert [event.sequence for event in writer.read()] == list(range(6))


@pytest.mark.usefixtures("long")
def test_writer_leaves_no_journal_to_an_index_that_is_written_anew(log):
    """SQLite would roll it back into the new index, and lines of a model would be missing there."""
    AuditLog(log.root).read()
    index = log.path.with_name(".enginegate-audit-index.db")
    with closing(line_index._connect(str(index))) as writer:
        writer.execute("update line set model = 'c'")  # and it does not come to its end

        beside = {path.name for path in log.root.iterdir()}

    assert beside == {index.name, log.path.name, ".enginegate-audit-head.json"}


@pytest.mark.usefixtures("long")
def test_readers_that_write_the_index_at_once_do_not_meet(log):
    """Threads of one process, or containers in which every process has the same number."""
    with ThreadPoolExecutor(4) as readers:
        found = list(readers.map(lambda _: len(AuditLog(log.root).of("a")), range(16)))

    assert found == [2] * 16


@pytest.mark.usefixtures("long")
def test_index_that_a_killed_reader_left_half_written_goes(log):
    """Once it is too old to be of somebody who writes it now."""
    young, old = (log.root / f"..enginegate-audit-index.db.{name}.tmp" for name in ("1", "2"))
    for path in (young, old):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))

    AuditLog(log.root).read()

    assert young.exists()
    assert not old.exists()
