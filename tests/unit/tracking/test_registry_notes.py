"""Where the versions of a registered model stand, from the audit log."""

from datetime import timedelta

from enginegate.chained_log.hash_chain import GENESIS
from enginegate.repository.history.audit import Event
from enginegate.tracking.registry_notes import release_notes
from tests.fakes.evidence import WHEN, release


def event(number, what, version, **fields):
    said = {"model": "digits", "who": "ada", "why": "margins are wide", "origin": "ada@host"}
    place = {"sequence": number, "at": WHEN + timedelta(hours=number), "previous": GENESIS}
    return Event(**{**said, **place, "event": what, "release": version, **fields})


def made(version, uri, before=None):
    return release(version=version, model_uri=f"models:/digits/{uri}", previous_version=before)


def states(events, *releases):
    notes = release_notes(events, releases)
    return {uri.rpartition("/")[2]: note.state for uri, note in notes.items()}


def test_live_and_the_one_that_a_rollback_returns_to():
    """Only the release that the live one replaced is *previous*."""
    log = [event(n, "published", n) for n in (1, 2, 3)]

    found = states(log, made(1, 1), made(2, 2, 1), made(3, 3, 2))

    assert found == {"1": "replaced", "2": "previous", "3": "live"}


def test_rolled_back_release_stays_rolled_back():
    """Also after the next one went live; and the one that is live again has no previous one."""
    log = [event(1, "published", 1), event(2, "published", 2), event(3, "rolled back", 1)]
    releases = made(1, 1), made(2, 2, 1), made(3, 3, 1)

    assert states(log, *releases[:2]) == {"1": "live", "2": "rolled back"}
    log.append(event(4, "published", 3))
    assert states(log, *releases) == {"1": "previous", "2": "rolled back", "3": "live"}


def test_withdrawn_release():
    """Nothing is live afterwards."""
    log = [event(1, "published", 1), event(2, "withdrawn", 1, why="it answers nonsense")]

    (note,) = release_notes(log, [made(1, 1)]).values()

    assert note.text.startswith("WITHDRAWN r1 onnxruntime-int8\n")
    assert "it answers nonsense." in note.text


def test_broken_promise_until_it_is_acknowledged():
    """In the state of the live release."""
    log = [event(1, "published", 1), event(2, "promise broken", 1, check=4, why="p99 40 ms")]

    (note,) = release_notes(log, [made(1, 1)]).values()

    assert note.state == "live, promise broken"
    assert "p99 40 ms" in note.text
    log.append(event(3, "acknowledged", 1, check=4))
    assert states(log, made(1, 1)) == {"1": "live"}


def test_version_that_was_released_twice_shows_the_live_release():
    """Another precision of one version replaced the first."""
    log = [event(1, "published", 1), event(2, "published", 2)]

    assert states(log, made(1, 7), made(2, 7, 1)) == {"7": "live"}


def test_release_without_a_manifest_is_left_out():
    """The version that it came from is not known."""
    log = [event(1, "published", 1), event(2, "published", 2)]

    assert states(log, made(2, 2, 1)) == {"2": "live"}


def test_text_begins_with_the_state_in_plain_words():
    """MLflow's list shows the first 25 characters or so, raw."""
    (note,) = release_notes([event(1, "published", 1)], [made(1, 1)]).values()

    assert note.text.splitlines()[0] == "LIVE r1 onnxruntime-int8"
    assert len(note.text.splitlines()[0]) <= 25
    assert note.tags("http://mlflow")["enginegate.state"] == "live, release 1"


def test_peoples_words_are_text_and_leave_room():
    """MLflow draws descriptions as Markdown, and its database keeps 5000 characters of each."""
    why = "![see](http://elsewhere/x.png) <img src=x> " + "long " * 2000

    (note,) = release_notes([event(1, "published", 1, why=why)], [made(1, 1)]).values()

    assert r"!\[see\](http" in note.text
    assert r"\<img" in note.text
    assert len(note.text) < 2500
