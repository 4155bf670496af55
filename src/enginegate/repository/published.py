"""What the journal, whose lines are chained, remembers of a release from when it was published."""

from collections.abc import Iterable

from enginegate.decision import Release
from enginegate.errors import TamperedError
from enginegate.repository.journal import Entry, Journal
from enginegate.repository.layout import JOURNAL, Layout

_YES, _NO = "yes", "no"


def remembered(layout: Layout, release: Release) -> dict[str, str]:
    """What the journal takes in of a release that was just placed (and signed, if it was)."""
    signed = layout.signature_file(release.version).is_file()
    return {"release": release.digest, "signed": _YES if signed else _NO}


def check_as_published(
    layout: Layout, release: Release, entries: Iterable[Entry] | None = None
) -> None:
    """Refuse a manifest that was changed since, and a signature that was taken away.

    Args:
        layout: of its model.
        release: as its manifest says now.
        entries: the journal's, if they were read already.

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
    if told.get("signed") == _YES and not layout.signature_file(version).is_file():
        raise TamperedError(
            f"Release {version} of {name} was signed when it was published, and "
            f"{layout.signature_file(version)} is gone. Find out who removed it; until then go to "
            "one that verifies."
        )
