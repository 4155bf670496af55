"""Where each registered version stands: its description, and tags to find it by.

MLflow's list of versions shows the first 25 characters or so of a description, as plain text; so it
begins with the state, in capitals, and the candidate. What a person wrote there stays below ours.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from enginegate.candidate import registered_version
from enginegate.decision import Release
from enginegate.evidence import Scorecard
from enginegate.messages import escape_markdown
from enginegate.repository.history.audit import Event, live_changes
from enginegate.repository.history.broken_promises import broken_promises
from enginegate.tracking import summary
from enginegate.tracking.connection import Connection
from enginegate.tracking.ui_links import page_place, runs_place, ui_base

STATE_OF_VERSION = "enginegate.state"
LIVE, PREVIOUS, REPLACED, BROKEN = "live", "previous", "replaced", "live, promise broken"
ROLLED_BACK, WITHDRAWN = "rolled back", "withdrawn"
WAITING, APPROVED, REJECTED, NO_WINNER = "waiting", "approved", "rejected", "no winner"
_STANDING_BY = frozenset({LIVE, PREVIOUS, BROKEN})
# What the audit log says of a version's release stays when the version is qualified once more.
_OF_RELEASES = _STANDING_BY | {REPLACED, ROLLED_BACK, WITHDRAWN}
_ANSWERED = frozenset({WAITING, APPROVED, REJECTED})
_OURS_ENDS = "*Written by Enginegate. What is written below this line stays.*"
_TAG_LENGTH = 1000
# MLflow's database keeps 5000 characters of a description, and what a person wrote is among them.
_LONGEST_SENTENCE = 1000


@dataclass(frozen=True, slots=True)
class VersionNote:
    """What a registered version says of itself.

    Attributes:
        state: one of the words of this module.
        candidate: what was, or would be, served of it; empty: nothing.
        sentence: why, in plain text.
        release: its release in the live repository; None: none.
        scorecard: digest of the evidence.
        places: pages in MLflow's UI with the evidence, by their words, relative to the UI.
    """

    state: str
    candidate: str
    sentence: str
    release: int | None = None
    scorecard: str = ""
    places: Mapping[str, str] | None = None

    @property
    def text(self) -> str:
        """Markdown whose first words are the state."""
        which = f" r{self.release}" if self.release else ""
        headline = f"{self.state.upper()}{which} {self.candidate}".rstrip()
        links = " · ".join(f"[{words}]({at})" for words, at in (self.places or {}).items())
        return "\n\n".join(part for part in (headline, self.sentence, links) if part)

    def tags(self, base: str) -> dict[str, str]:
        """The same as tags; a link there is whole, since MLflow shows it as text."""
        page = next(iter((self.places or {}).values()), "")
        tags = {
            STATE_OF_VERSION: f"{self.state}, release {self.release}"
            if self.release
            else self.state,
            "enginegate.candidate": self.candidate or "none",
            "enginegate.scorecard": self.scorecard,
            "enginegate.scorecard_link": f"{base}/{page}" if page else "",
        }
        return {name: value[:_TAG_LENGTH] for name, value in tags.items() if value}


def note_qualified(connection: Connection, scorecard: Scorecard, experiment: str) -> None:
    """Say on the registered version how its qualification ended, unless it was released already."""
    named = registered_version(scorecard.model_uri)
    if named is None:
        return
    state = NO_WINNER if scorecard.winner is None else WAITING
    said = summary.result_sentence(scorecard)
    if scorecard.winner is not None:
        said += " It waits for a person's approval."
    note = VersionNote(
        state=state,
        candidate=str(scorecard.winner or ""),
        sentence=said,
        scorecard=scorecard.digest,
        places=evidence_places(experiment, scorecard.mlflow_run),
    )
    write_note(connection, named, note, unless=_OF_RELEASES)


def note_answer(connection: Connection, scorecard: Scorecard, event: Event) -> None:
    """Say on the registered version who approved or rejected it, while it waits to go live."""
    named = registered_version(scorecard.model_uri)
    if named is None:
        return
    experiment = connection.client.get_run(scorecard.mlflow_run).info.experiment_id
    note = VersionNote(
        state=event.event,
        candidate=str(scorecard.winner or ""),
        sentence=f"{summary.result_sentence(scorecard)} {event.event.capitalize()} by "
        f"{escape_markdown(event.who)}, {event.at:%Y-%m-%d %H:%M} UTC: {_ended(event.why)}",
        scorecard=scorecard.digest,
        places=evidence_places(str(experiment), scorecard.mlflow_run),
    )
    write_note(connection, named, note, only=_ANSWERED)


def evidence_places(experiment: str, run: str) -> dict[str, str]:
    """The pages with a qualification's evidence, relative to MLflow's UI."""
    return {
        "Decision page": page_place(experiment, run),
        "candidates compared": runs_place(experiment, run),
    }


def write_note(
    connection: Connection,
    named: tuple[str, int],
    note: VersionNote,
    *,
    find_places: Callable[[str], Mapping[str, str]] | None = None,
    unless: frozenset[str] = frozenset(),
    only: frozenset[str] | None = None,
) -> bool:
    """Write a version's note where it is not there yet; whether there is such a version.

    Args:
        connection: to MLflow.
        named: the registered model, and the version's number.
        note: what is said.
        find_places: of a scorecard, for a note that has none; asked only where it is not written.
        unless: states in which the version keeps what it says.
        only: states that may be replaced, of versions that have one; None: all.
    """
    name, version = named[0], str(named[1])
    found = connection.found(lambda client: client.get_model_version(name, version))
    if found is None:
        return False
    before = str(found.tags.get(STATE_OF_VERSION, "")).partition(", release")[0]
    if before in unless or (only is not None and before not in {*only, ""}):
        return True
    if find_places is not None:
        if (found.description or "").startswith(note.text):
            return True
        note = replace(note, places=find_places(note.scorecard))
    text = _beside_own_words(note.text, found.description or "")
    if text != found.description:
        connection.client.update_model_version(name, version, text)
    for tag, value in note.tags(ui_base(connection)).items():
        if found.tags.get(tag) != value:
            connection.client.set_model_version_tag(name, version, tag, value)
    return True


def release_notes(events: Sequence[Event], releases: Sequence[Release]) -> dict[str, VersionNote]:
    """Where every version with a release stands, by its address, ``models:/NAME/VERSION``.

    Of a version's releases the live one counts, then the one that a rollback returns to, then the
    newest that was live.

    Args:
        events: of one model, oldest first.
        releases: of that model whose manifests are here.
    """
    known = {release.version: release for release in releases}
    notes: dict[int, VersionNote] = {}
    live: int | None = None
    for change in live_changes(events):
        live, event = change.after, change.event
        by = escape_markdown(event.who)
        said = f"{event.at:%Y-%m-%d %H:%M} UTC by {by}: {_ended(event.why)}"
        if change.before in known and change.before != live:
            ended = change.kind if change.kind in {ROLLED_BACK, WITHDRAWN} else REPLACED
            after = f"to release {live}" if change.kind == ROLLED_BACK else f"by release {live}"
            words = f"{ended.capitalize()}{f' {after}' if live else ''} at {said}"
            notes.pop(change.before, None)
            notes[change.before] = _note_of(known[change.before], ended, words)
        if live in known:
            notes.pop(live, None)
            notes[live] = _note_of(known[live], LIVE, f"Live since {said}")
    if live in notes:
        _mark_previous(notes, known[live].previous_version)
        broken = [b for b in broken_promises(events, known[live].model) if b.release == live]
        if broken and broken[-1].acknowledged is None:
            notes[live] = replace(notes[live], state=BROKEN, sentence=_ended(str(broken[-1])))
    found: dict[str, VersionNote] = {}
    for number, note in notes.items():
        uri = known[number].model_uri
        if uri not in found or found[uri].state not in _STANDING_BY or note.state in {LIVE, BROKEN}:
            found[uri] = note
    return found


def _mark_previous(notes: dict[int, VersionNote], previous: int | None) -> None:
    if previous in notes and notes[previous].state == REPLACED:
        said = f"{notes[previous].sentence} `enginegate rollback` returns to it."
        notes[previous] = replace(notes[previous], state=PREVIOUS, sentence=said)


def _note_of(release: Release, state: str, said: str) -> VersionNote:
    promised = f"Promised: {release.promise}." if state == LIVE else ""
    return VersionNote(
        state=state,
        candidate=str(release.engine.candidate),
        sentence=f"{said} {promised}".rstrip(),
        release=release.version,
        scorecard=release.scorecard_sha256,
    )


def _ended(sentence: str) -> str:
    """A person's or a check's words as Markdown in one line, with a full stop."""
    joined = " ".join(sentence.split())
    if len(joined) > _LONGEST_SENTENCE:
        joined = f"{joined[:_LONGEST_SENTENCE]} …"
    joined = escape_markdown(joined)
    return joined if joined.endswith((".", "!", "?")) else f"{joined}."


def _beside_own_words(text: str, description: str) -> str:
    """Our text, and below it what somebody wrote by hand."""
    ours, mark, theirs = description.partition(_OURS_ENDS)
    own_words = (theirs if mark else ours).strip()
    return "\n\n".join(part for part in (text, _OURS_ENDS, own_words) if part)
