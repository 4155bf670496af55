"""The live repository: publish, roll back, recover. Nothing else in the program changes it.

A change is committed by one rename, of ``current.json``. Killed before it, the next start restores
the old release; killed after it, the new one stands. Every operation begins by recovering.
"""

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from enginegate.decision import Release
from enginegate.durable import write_file
from enginegate.errors import (
    EnginegateError,
    PublishError,
    RepositoryError,
    ServerError,
)
from enginegate.repository.journal import Entry, Journal
from enginegate.repository.layout import JOURNAL, Current, Layout, locked, models
from enginegate.repository.serving import (
    LiveModel,
    config_is_right,
    known_releases,
    right_config,
    served_config,
)
from enginegate.repository.staging import Package, forget_old, place, remove
from enginegate.repository.transitions import (
    after_publish,
    after_rollback,
    check_expected,
    rollback_target,
)
from enginegate.triton.client import TritonClient

_LOCK_TIMEOUT_S = 30.0
_log = logging.getLogger("enginegate.repository")


@dataclass(frozen=True, slots=True)
class LiveRepository:
    """One Triton model repository and the server that serves from it.

    Attributes:
        root: the folder Triton reads.
        client: the live server; None when it is down, which only recovery of the folder can bear.
        load_timeout_s: limit on one load.
        keep: releases whose bytes are kept.
    """

    root: Path
    client: TritonClient | None
    load_timeout_s: float = 120.0
    keep: int = 5

    def publish(self, package: Package, *, expected: int | None) -> Release:
        """Make a package the live release of its model, or leave everything as it was.

        Args:
            package: what to publish.
            expected: the release that was live when this promotion was prepared.

        Raises:
            RepositoryBusyError: somebody else is changing this repository.
            RepositoryError: another release is live than expected, or the repository has no server.
            PublishError: something went wrong on the way and was undone; the message names the
            step.
        """
        with self._changing() as journal:
            layout = Layout(self.root, package.model)
            before = layout.current()
            check_expected(layout, before, expected)
            self._live(layout)
            version = 1 + max(
                [journal.last_version(package.model), *(r.version for r in layout.releases())]
            )
            entry = journal.open("publish", package.model, version)
            with self._undone_on_failure(layout, journal, entry):
                release = place(layout, package, version, before)
                journal.add(entry, "placed", release=release.digest)
                self._switch(layout, journal, entry, after_publish(before, version))
            journal.add(entry, "done")
            release = layout.release(version)
            self._forget(layout)
            return release

    def rollback(self, model: str, to: int | None = None) -> Release:
        """Make an earlier release live again: by default the one that the live one replaced.

        Raises:
            RepositoryError: there is no such release, or its bytes are gone.
            TamperedError: its bytes changed since it was published.
            PublishError: it did not prove itself; the release that was live is live again.
        """
        with self._changing() as journal:
            layout = Layout(self.root, model)
            before = layout.current()
            version = rollback_target(layout, before, to)
            layout.check_files(layout.release(version))
            if before is None:
                raise RepositoryError(f"Nothing of {model} is live.")
            entry = journal.open("rollback", model, version)
            with self._undone_on_failure(layout, journal, entry):
                self._switch(layout, journal, entry, after_rollback(before, version))
            journal.add(entry, "done")
            return layout.release(version)

    def withdraw(self, model: str, version: int) -> str:
        """Take back a release whose promotion failed after it was published.

        Returns:
            What is live now, in words.
        """
        previous = Layout(self.root, model).release(version).previous_version
        if previous is not None:
            return f"Release {self.rollback(model, previous).version} is live, as before."
        with self._changing() as journal:
            layout = Layout(self.root, model)
            entry = journal.open("withdraw", model, version)
            return self._undo(layout, journal, entry, reason="its promotion failed")

    def recover(self) -> tuple[str, ...]:
        """Finish or undo what a killed process left; one sentence for each operation found."""
        with self._changing(recover=False) as journal:
            return self._recover(journal)

    def repair(self) -> tuple[str, ...]:
        """Recover, put back every configuration that is not right, and load what does not serve."""
        with self._changing(recover=False) as journal:
            said = list(self._recover(journal))
            for name in models(self.root):
                layout = Layout(self.root, name)
                current = layout.current()
                if current is not None and not config_is_right(layout, current):
                    write_file(layout.config, right_config(layout, current))
                    said.append(f"{layout.config} was put back: {_live_words(current)}.")
                if current is not None and self.client is not None and not self.serves(name):
                    self.bring_up(name)
                    said.append(f"Release {current.version} of {name} was loaded and proved.")
            return tuple(said)

    def serves(self, model: str) -> bool:
        """Whether the server proves now that it serves the live release."""
        layout = Layout(self.root, model)
        current = layout.current()
        if current is None:
            return False
        try:
            self._live(layout).prove(current, layout.release(current.version), wait=False)
        except (ServerError, RepositoryError):
            return False
        return True

    def bring_up(self, model: str) -> Release:
        """Load the live release on a server that has just started, and prove it."""
        layout = Layout(self.root, model)
        current = layout.current()
        if current is None:
            raise RepositoryError(f"{self.root} has no live release of {model}.")
        release = layout.release(current.version)
        layout.check_files(release)
        live = self._live(layout)
        live.load(served_config(current, known_releases(layout, current)))
        live.prove(current, release)
        return release

    @contextmanager
    def _changing(self, *, recover: bool = True) -> Iterator[Journal]:
        with locked(self.root, timeout_s=_LOCK_TIMEOUT_S):
            journal = Journal(self.root / JOURNAL)
            if recover:
                self._recover(journal)
            yield journal

    def _switch(self, layout: Layout, journal: Journal, entry: Entry, after: Current) -> None:
        """The one function that changes what is live: configure, load, prove, commit."""
        release = layout.release(after.version)
        live = self._live(layout)
        write_file(layout.config, right_config(layout, after))
        journal.add(entry, "configured")
        live.load(served_config(after, known_releases(layout, after)))
        journal.add(entry, "loaded")
        live.prove(after, release)
        write_file(layout.current_file, after.pretty_json())

    @contextmanager
    def _undone_on_failure(self, layout: Layout, journal: Journal, entry: Entry) -> Iterator[None]:
        """Whatever ends the block early (Ctrl-C too), the release that was live is restored."""
        try:
            yield
        except BaseException as error:
            step = journal.last_step(entry)
            note = self._undo(layout, journal, entry, reason=str(error))
            if not isinstance(error, EnginegateError):
                raise
            raise PublishError(
                f"The {entry.kind} of {entry.model} release {entry.version} failed after its step "
                f"'{step}': {error}\n{note}"
            ) from error

    def _undo(self, layout: Layout, journal: Journal, entry: Entry, *, reason: str) -> str:
        """Restore what ``current.json`` says, on disk first, then on the server.

        If the server does not answer, or what is on disk is damaged, the operation stays open in
        the journal: whoever changes the repository next tries again.
        """
        current = layout.current()
        if entry.kind == "withdraw" and current is not None:
            if current.version != entry.version:
                journal.add(entry, "undone", reason="another release is live by now")
                return f"{_live_words(current)}."
            layout.current_file.unlink()
            current = None
        elif current is not None and current.version == entry.version:
            journal.add(entry, "done", note="it was committed before it was interrupted")
            return f"Release {entry.version} is live."
        if current is not None:
            write_file(layout.config, right_config(layout, current))
        try:
            self._tell_server(layout, current)
        except (ServerError, RepositoryError) as error:
            return f"{_live_words(current)} on disk; that it serves could not be proved: {error}"
        if entry.kind == "publish":
            remove(layout, entry.version)
        if current is None:
            shutil.rmtree(layout.folder, ignore_errors=True)
        journal.add(entry, "done" if entry.kind == "withdraw" else "undone", reason=reason[:500])
        return f"{_live_words(current)}, as before."

    def _tell_server(self, layout: Layout, current: Current | None) -> None:
        if self.client is None:
            return
        live = LiveModel(self.client, layout, self.load_timeout_s)
        if current is not None:
            live.load(served_config(current, known_releases(layout, current)))
            live.prove(current, layout.release(current.version))
        elif live.is_loaded():
            live.unload()

    def _recover(self, journal: Journal) -> tuple[str, ...]:
        said = []
        for entry in journal.unfinished():
            layout = Layout(self.root, entry.model)
            note = self._undo(layout, journal, entry, reason=f"cut short after {entry.step}")
            said.append(
                f"A {entry.kind} of {entry.model} release {entry.version} was cut short after its "
                "step "
                f"'{entry.step}'. {note}"
            )
        return tuple(said)

    def _forget(self, layout: Layout) -> None:
        """Retention must not fail a promotion that is done."""
        try:
            forget_old(layout, self.keep)
        except OSError as error:
            _log.warning("old releases below %s could not be removed: %s", layout.folder, error)

    def _live(self, layout: Layout) -> LiveModel:
        if self.client is None:
            raise RepositoryError(
                f"No live Triton answers for {self.root}, so nothing can be proved to serve. Start "
                "one (`enginegate serve POLICY`), or set target.endpoint in the policy."
            )
        return LiveModel(self.client, layout, self.load_timeout_s)


def _live_words(current: Current | None) -> str:
    return f"Release {current.version} is live" if current else "Nothing is live"
