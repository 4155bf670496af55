"""What the journal, whose lines are chained, remembers of a release from when it was published."""

from collections.abc import Iterable

from enginegate.decision import Release
from enginegate.errors import TamperedError
from enginegate.repository.history.audit import LIVE_EVENTS, AuditLog, Event
from enginegate.repository.history.journal import Entry, Journal
from enginegate.repository.store.layout import JOURNAL, Layout

_YES, _NO = "yes", "no"


def manifest_facts(layout: Layout, release: Release) -> dict[str, str]:
    """What the journal takes in of a release that was just placed (and signed, if it was)."""
    signed = layout.signature_file(release.version).is_file()
    return {"release": release.digest, "signed": _YES if signed else _NO}


def check_as_published(
    layout: Layout,
    release: Release,
    entries: Iterable[Entry] | None = None,
    events: Iterable[Event] | None = None,
) -> None:
    """Refuse a manifest that was changed since, and a signature that was taken away.

    Args:
        layout: of its model.
        release: as its manifest says now.
        entries: the journal's, if they were read already.
        events: the audit log's, if they were read already; they hold the manifest's digest too.

    Raises:
        TamperedError: it is not what was published.
    """
    known = Journal(layout.root / JOURNAL).read() if entries is None else entries
    name, version = layout.model, release.version
    placed = [e for e in known if (e.model, e.version, e.step) == (name, version, "placed")]
    told = placed[-1].detail if placed else {}
    if told.get("release", release.digest) != release.digest:
        raise TamperedError(
            f"{layout.release_file(version)} is not the manifest that was published: its digest is "
            f"{release.digest}, the journal has {told['release']}."
        )
    noted = _noted(layout, version, events)
    if noted is not None and noted.manifest != release.digest:
        raise TamperedError(
            f"{layout.release_file(version)} is not the manifest that was published: its digest is "
            f"{release.digest}, line {noted.sequence + 1} of the audit log has {noted.manifest}."
        )
    if told.get("signed") == _YES and not layout.signature_file(version).is_file():
        raise TamperedError(
            f"Release {version} of {name} was signed when it was published, and "
            f"{layout.signature_file(version)} is gone. Find out who removed it; until then go to "
            "one that verifies."
        )


def _noted(layout: Layout, version: int, events: Iterable[Event] | None) -> Event | None:
    """The first event with a manifest of a release that went live."""
    known = AuditLog(layout.root).read() if events is None else events
    own = (e for e in known if (e.model, e.release) == (layout.model, version))
    return next((e for e in own if e.event in LIVE_EVENTS and e.manifest), None)
