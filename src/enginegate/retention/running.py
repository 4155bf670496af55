"""Runs that are under way: a locked file each, so that a run that died counts no more.

A qualification may take longer than anything is kept for. While it runs, nothing is deleted that
was used after it began; and the scorecard that a promotion is about is kept with all it names.
"""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from uuid import uuid4

from enginegate.atomic_io import open_regular
from enginegate.errors import InputError
from enginegate.machine import user_at_host
from enginegate.records import Record
from enginegate.workspace import Workspace, now

_FOLDER = "running"
_log = logging.getLogger("enginegate.retention")


class RunMarker(Record):
    """One run."""

    what: str
    scorecard: str = ""
    """Digest, or its beginning, of the scorecard that it is about."""
    began_at: datetime
    by: str


@dataclass(frozen=True, slots=True)
class RunsUnderWay:
    """Runs that may need what is kept.

    Attributes:
        marks: which they are, by a name that no other run has.
        since: when the first of them began; None: there is none.
        scorecards: that they name.
    """

    marks: frozenset[str] = frozenset()
    since: datetime | None = None
    scorecards: frozenset[str] = frozenset()

    def and_also(self, other: "RunsUnderWay") -> "RunsUnderWay":
        """These and others."""
        began = [since for since in (self.since, other.since) if since is not None]
        return RunsUnderWay(
            self.marks | other.marks,
            min(began, default=None),
            self.scorecards | other.scorecards,
        )


@contextmanager
def marked_as_running(workspace: Workspace, what: str, scorecard: str = "") -> Iterator[None]:
    """Say that a run is under way, until the block ends or this process does.

    A disk that is full fails no run by this: then only the times of what it uses protect it.
    """
    marker = RunMarker(what=what, scorecard=scorecard, began_at=now(), by=user_at_host())
    path = workspace.root / _FOLDER / f"{uuid4().hex}.json"
    staged = path.with_name(f".{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = open_regular(staged, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        _log.warning("nobody can see that this run is under way: %s", error)
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
            os.write(handle, marker.pretty_json())
            # It has its name from the moment on in which it is locked.
            staged.rename(path)
        yield
    finally:
        for left in (path, staged):
            with suppress(OSError):
                left.unlink(missing_ok=True)
        os.close(handle)


def runs_in(workspace: Workspace) -> RunsUnderWay:
    """The runs on this workspace that are under way; what dead ones left is removed."""
    found = RunsUnderWay()
    for path in sorted((workspace.root / _FOLDER).glob("[!.]*.json")):
        marker = _alive(path)
        if marker is not None:
            named = frozenset({marker.scorecard} if marker.scorecard else ())
            found = found.and_also(RunsUnderWay(frozenset({path.stem}), marker.began_at, named))
    return found


def _alive(path: Path) -> RunMarker | None:
    """What a marker says; None: its process is gone."""
    try:
        handle = open_regular(path)
    except FileNotFoundError:
        return None
    with os.fdopen(handle, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            with suppress(InputError, FileNotFoundError):
                return RunMarker.read(path)
            return None
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return None
