"""A live repository of many models and releases, as so many promotions would have left it.

One release is published by the program itself on a Triton in memory. All others are it under
another name and number: their bytes are hard links, their manifests, the journal, the audit log,
live pointers and configurations are written whole, with every digest and every link of both chains.
`verify` finds nothing wrong with it.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from enginegate.atomic_io import write_file
from enginegate.chained_log.hash_chain import GENESIS
from enginegate.decision import Head, Release
from enginegate.repository import Current, Layout, LiveRepository
from enginegate.repository.deploy.desired_config import right_config
from enginegate.repository.history.audit import AUDIT, AUDIT_HEAD
from enginegate.repository.history.journal import JOURNAL
from enginegate.repository.store.pointer import commit
from enginegate.repository.store.release_files import ReleaseFiles
from tests.fakes.live_triton import FakeTriton, package_in

BEGAN = datetime(2024, 1, 1, tzinfo=UTC)
_EVERY = timedelta(seconds=20)
_STEPS = ("intent", "placed", "configured", "loaded", "done")
_ORIGIN = "dana@build-7, command"
_WHY = "dana: better on every slice of the evaluation data, and 14 % faster than what is live"


def model_name(number: int) -> str:
    """``model-0007``."""
    return f"model-{number:04d}"


@dataclass
class _Chain:
    """A hash-chained file that is written from its beginning."""

    file: IO[bytes]
    count: int = 0
    last: str = GENESIS

    def add(self, fields: dict[str, Any]) -> None:
        """Write a line as `HashChain` would."""
        fields |= {"sequence": self.count, "previous": self.last}
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        line = text.encode()
        self.file.write(line + b"\n")
        self.count, self.last = self.count + 1, sha256(line).hexdigest()

    @property
    def head(self) -> Head:
        """How far it has come."""
        return Head(count=self.count, sha256=self.last)


@dataclass
class Populated:
    """What is made.

    Attributes:
        root: the repository; must be empty, or not there.
        models: how many.
        releases: of each, all with their bytes.
        lines: of the audit log; those that no publication needs are promises that were broken and
            acknowledged.
    """

    root: Path
    models: int
    releases: int
    lines: int
    _at: datetime = field(default=BEGAN, init=False)
    _template: tuple[Release, Layout] = field(init=False)

    def make(self) -> None:
        """Write it all."""
        self.root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.root.parent) as name:
            self._template = _template(Path(name))
            with (
                (self.root / JOURNAL).open("wb") as journal,
                (self.root / AUDIT).open("wb") as audit,
            ):
                entries, events = _Chain(journal), _Chain(audit)
                rounds = self.models * self.releases
                for done, (version, number) in enumerate(self._releases(), start=1):
                    due = self.lines * done // rounds
                    self._publish(version, number, entries, events, due)
            head = events.head
        write_file(self.root / AUDIT_HEAD, head.pretty_json())
        for number in range(self.models):
            layout = Layout(self.root, model_name(number))
            served = (self.releases - 1, self.releases) if self.releases > 1 else (1,)
            current = Current(
                version=self.releases,
                standby=served[0] if len(served) > 1 else None,
                known=served,
                changed_at=self._at,
            )
            write_file(layout.config, right_config(layout, current))
            commit(layout, current)

    def _releases(self) -> Iterator[tuple[int, int]]:
        """Version after version, so that the lines of a model lie far apart."""
        for version in range(1, self.releases + 1):
            for number in range(self.models):
                yield version, number

    def _publish(self, version: int, number: int, journal: _Chain, audit: _Chain, due: int) -> None:
        model, operation = model_name(number), sha256(f"{number}/{version}".encode()).hexdigest()
        layout = Layout(self.root, model)
        card = sha256(f"card {number}/{version}".encode()).hexdigest()
        about = {"model": model, "origin": _ORIGIN, "who": "dana", "scorecard": card}
        audit.add(
            about | {"event": "approved", "why": _WHY, "at": self._now(), "operation": operation}
        )
        template, source = self._template
        release = template.model_copy(
            update={
                "model": model,
                "model_uri": f"models:/{model}/{version}",
                "version": version,
                "previous_version": version - 1 or None,
                "scorecard_sha256": card,
                "published_at": self._at,
                "audit": audit.head,
            }
        )
        _link(template, source, release, layout)
        digest, run = release.digest, operation[:32]
        details = {
            "intent": {"channel": "command"},
            "placed": {"release": digest, "signed": "no"},
            "done": {"reason": _WHY},
        }
        for step in _STEPS:
            if step == "done":
                told = {"event": "published", "why": _WHY, "at": self._now(), "operation": run}
                audit.add(about | told | {"release": version, "manifest": digest})
            journal.add(
                {
                    "at": self._now(),
                    "detail": details.get(step, {}),
                    "kind": "publish",
                    "model": model,
                    "operation": run,
                    "step": step,
                    "version": version,
                }
            )
        check = 0
        while audit.count < due:
            check += 1
            self._broken(audit, model, version, check, digest)

    def _broken(self, audit: _Chain, model: str, version: int, check: int, digest: str) -> None:
        """A broken promise, then its acknowledgement."""
        at = self._now()
        about = {"model": model, "release": version, "check": (check + 1) // 2}
        if check % 2:
            audit.add(
                about
                | {
                    "event": "promise broken",
                    "who": "watch",
                    "origin": "enginegate@build-7, watch",
                    "why": "server_time: promised <= 3 ms, measured 4.1 ms; 3.9 to 4.3 ms",
                    "at": at,
                    "operation": f"check:{digest[:16]}:{check}:{at}",
                }
            )
        else:
            said = {"who": "dana", "origin": _ORIGIN, "why": "a neighbour took the cores; it left"}
            audit.add(about | said | {"event": "acknowledged", "at": at})

    def _now(self) -> str:
        self._at += _EVERY
        return self._at.isoformat().replace("+00:00", "Z")


def _template(folder: Path) -> tuple[Release, Layout]:
    """A release that the program published, and where."""
    root = folder / "host" / "live"
    root.mkdir(parents=True)
    repository = LiveRepository(root, FakeTriton(root), load_timeout_s=1.0)
    release = repository.publish(package_in(folder, 1.0), expected=None)
    return release, Layout(root, release.model)


def _link(template: Release, source: Layout, release: Release, layout: Layout) -> None:
    """The bytes of a release as hard links, and its manifest."""
    wanted = ReleaseFiles(layout, release).digests
    files = zip(ReleaseFiles(source, template).digests, wanted, strict=True)
    for folder in {path.parent for path in wanted}:
        folder.mkdir(parents=True, exist_ok=True)
    for there, here in files:
        try:
            os.link(there, here)
        except OSError:  # a file system allows so many names of one file
            here.write_bytes(there.read_bytes())
    layout.release_file(release.version).write_bytes(release.pretty_json())
