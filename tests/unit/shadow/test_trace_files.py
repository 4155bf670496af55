"""Which trace files are a recording's own, and what is done when Triton still owes some."""

import os
from datetime import UTC, datetime, timedelta

import pytest

from enginegate.errors import ServerError
from enginegate.shadow import trace_recovery
from enginegate.shadow.trace_files import RecordingNote, TraceFiles, end_traces
from enginegate.shadow.trace_recovery import recover_traces, write_late_note

_SET = {"trace_level": ("TENSORS",), "trace_rate": ("1",), "trace_count": ("100",)}
_OFF = {"trace_level": ("OFF",), "trace_rate": ("1000",), "trace_count": ("-1",)}


def written(path, *requests, model="m", whole=True):
    objects = [
        f'{{"id":{number},"model_name":"{model}","model_version":1,"request_id":"{name}"}},'
        f'{{"id":{number},"timestamps":[]}}'
        for number, name in enumerate(requests, start=1)
    ]
    path.write_text("[" + ",".join(objects) + "]" * whole)
    return path


@pytest.fixture
def traces(tmp_path):
    (tmp_path / "traces").mkdir()
    return tmp_path / "traces" / "trace.json"


@pytest.fixture
def note(traces):
    return RecordingNote(
        address="127.0.0.1:1",
        server="triton",
        model="m",
        set=_SET,
        undo=dict.fromkeys(_SET),
        traces=traces,
        modified={},
        ours=True,
    )


class _Server:
    """Its settings, as a connection to it shows and changes them."""

    def __init__(self, settings, name="triton"):
        self.settings, self.name = dict(settings), name

    def __call__(self, _address, **_):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def metadata(self):
        return self

    def trace_settings(self, _model):
        return dict(self.settings)

    def set_trace(self, settings, _model):
        cleared = all(value is None for value in settings.values())
        self.settings = dict(_OFF) if cleared else self.settings | dict(settings)


@pytest.fixture
def serve(monkeypatch):
    def put(settings, **options):
        server = _Server(settings, **options)
        monkeypatch.setattr(trace_recovery, "TritonClient", server)
        return server

    return put


def test_only_what_triton_names_so_for_this_model(note, traces):
    """Other names, folders and another model's file are nobody's business here."""
    ours = [written(traces.with_name(f"trace.json.{n}"), "a") for n in (3, 11)]
    written(traces.with_name("trace.json.4"), "b", model="other")
    written(traces.with_name("trace.json-notes"), "c")
    written(traces.with_name("trace.json2.0"), "d")
    traces.with_name("trace.json.5").mkdir()
    files = TraceFiles(note)

    assert sorted(files.paths()) == sorted(ours)
    assert files.requests() == 2
    files.discard()
    assert len(list(traces.parent.iterdir())) == 4


def test_request_id_may_hold_any_text(note, traces):
    """Quotes and braces in what users chose cost no count and no model."""
    written(traces.with_name("trace.json.0"), 'a"b', '{"id":9}', "plain")

    assert TraceFiles(note).requests() == 3


def test_earlier_file_that_is_written_over_counts_as_new(note, traces):
    """A restarted server counts from 0 again, over what an earlier one had left."""
    old = written(traces.with_name("trace.json.0"), "a")
    modified = {str(old): old.stat().st_mtime_ns}
    files = TraceFiles(note.model_copy(update={"modified": modified}))
    assert files.paths() == []

    written(old, "a", "b")
    os.utime(old, ns=(1, 1))

    assert (files.paths(), files.requests()) == ([old], 2)


@pytest.mark.parametrize(("left", "sampled"), [("97", 3), ("0", 100), ("-1", 0), ("101", 0)])
def test_how_many_were_sampled(note, left, sampled):
    """Told by what is left; a restarted server knows nothing of ours."""
    server = _Server(_SET | {"trace_count": (left,)})

    assert end_traces(server, note) == sampled
    assert server.settings == _OFF


def test_late_traces_are_deleted_for_an_hour(note, traces, tmp_path, serve):
    """File by file, until as many came as are owed, or nobody can be on the way any more."""
    serve(_OFF)
    notes = tmp_path / "notes"
    notes.mkdir()
    write_late_note(notes / "x.json", note, owed=3)
    late = traces.with_name("trace.json.0")

    assert recover_traces(notes) == ()
    assert list(notes.glob("*.json")) == [notes / "x.late.json"]
    written(late, "a")
    assert recover_traces(notes) == ()
    assert (late.exists(), RecordingNote.read(notes / "x.late.json").owed) == (False, 2)
    past = datetime.now(tz=UTC) - timedelta(hours=2)
    RecordingNote.read(notes / "x.late.json").model_copy(update={"ended_at": past}).write(
        notes / "x.late.json"
    )
    assert recover_traces(notes) == ()
    assert not list(notes.glob("*.json"))


def test_files_of_somebody_who_traces_now_are_left(note, traces, tmp_path, serve):
    """Late ones cannot be told from theirs, so they wait."""
    serve(_SET)
    (tmp_path / "notes").mkdir()
    write_late_note(tmp_path / "notes" / "x.json", note, owed=1)
    theirs = written(traces.with_name("trace.json.0"), "a")

    assert recover_traces(tmp_path / "notes") == ()
    assert theirs.exists()
    assert (tmp_path / "notes" / "x.late.json").exists()


def test_killed_in_its_last_moments(note, traces, tmp_path, serve):
    """The settings were back, and the note still there: what comes later is deleted too."""
    serve(_OFF)
    notes = tmp_path / "notes"
    notes.mkdir()
    note.write(notes / "x.json")
    written(traces.with_name("trace.json.0"), "a")

    assert recover_traces(notes) == ()

    assert list(notes.glob("*.json")) == [notes / "x.late.json"]
    assert list(traces.parent.iterdir()) == []


def test_busy_server_is_not_taken_for_dead(note, tmp_path, monkeypatch):
    """What does not answer in time is asked again by the next start, if anybody listens there."""

    def silent(*_, **__):
        raise ServerError("no answer within 10 s")

    monkeypatch.setattr(_Server, "metadata", silent)
    monkeypatch.setattr(trace_recovery, "TritonClient", _Server(_SET))
    (tmp_path / "notes").mkdir()
    mine = tmp_path / "notes" / "x.json"
    note.model_copy(update={"server": "enginegate-1"}).write(mine)

    monkeypatch.setattr(trace_recovery, "_refuses", lambda _: False)
    assert recover_traces(mine.parent) == (f"{mine}: no answer within 10 s",)
    assert mine.exists()
    monkeypatch.setattr(trace_recovery, "_refuses", lambda _: True)
    assert recover_traces(mine.parent) == ()
    assert not mine.exists()
