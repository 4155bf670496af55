"""A killed recording is recovered when it can be, and never while it is still under way."""

import pytest

from enginegate.shadow.trace_files import RecordingNote
from enginegate.shadow.trace_recovery import exclusive_recording, recover_traces


@pytest.fixture
def notes(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    return folder


@pytest.fixture
def left(tmp_path, notes):
    """Leave a note of a server that does not answer, and two trace files."""

    def leave(server, *, ours=True):
        traces = tmp_path / "traces"
        traces.mkdir()
        for name in ("trace.json.0", "trace.json.1"):
            (traces / name).write_text("[]")
        settings = {"trace_level": ("TIMESTAMPS",), "trace_rate": ("1",)}
        note = RecordingNote(
            address="127.0.0.1:1",
            server=server,
            model="m",
            set=settings,
            undo=dict.fromkeys(settings),
            traces=traces / "trace.json",
            modified={str(traces / "trace.json.0"): (traces / "trace.json.0").stat().st_mtime_ns},
            ours=ours,
        )
        path = notes / "a.json"
        note.write(path)
        return path, traces

    return leave


def test_server_that_ended_with_its_owner_needs_no_recovery(notes, left):
    """Its settings are gone with it; the files that were written since are deleted."""
    path, traces = left("enginegate-0123")

    assert recover_traces(notes) == ()
    assert not path.exists()
    assert [file.name for file in traces.iterdir()] == ["trace.json.0"]


def test_traces_of_other_programs_are_not_deleted(notes, left):
    """Where others were tracing too, their files stay."""
    _, traces = left("enginegate-0123", ours=False)

    recover_traces(notes)

    assert len(list(traces.iterdir())) == 2


def test_unreachable_server_is_tried_again(notes, left):
    """A server of the user's may come back with its settings changed, so the note stays."""
    path, traces = left("triton")

    (complaint,) = recover_traces(notes)

    assert "127.0.0.1:1" in complaint
    assert path.exists()
    assert len(list(traces.iterdir())) == 2


def test_recording_under_way_is_left_alone(notes, left):
    """While its process holds the lock nothing is undone."""
    path, traces = left("enginegate-0123")
    with exclusive_recording(notes, "address", "model") as own:
        path = path.rename(own)

        assert recover_traces(notes) == ()
        assert path.exists()

    assert len(list(traces.iterdir())) == 2


def test_damaged_note_is_reported(notes, left):
    """A note that cannot be read is named, not lost."""
    path, _ = left("triton")
    path.write_text("{")

    (complaint,) = recover_traces(notes)

    assert str(path) in complaint
    assert path.exists()
