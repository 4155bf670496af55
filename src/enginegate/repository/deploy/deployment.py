"""One live model with everything it is made of: a single engine, or an ensemble and its parts.

An ensemble goes over in an order in which it always finds the versions it is pinned to: the parts
serve the old and the new version, then the ensemble is flipped, then the parts let go of the rest.
Unloading a version that a live ensemble is pinned to would take it down, and so would a flip to
one that is not loaded.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from enginegate.atomic_io import NotRegularFileError, read_file, write_file
from enginegate.decision import ComposingModel
from enginegate.errors import RepositoryError, ServerError
from enginegate.repository.deploy.desired_config import (
    LiveModel,
    check_loadable,
    known_digests,
    right_config,
    served_config,
)
from enginegate.repository.deploy.golden import Golden
from enginegate.repository.ensemble.composing_models import owned_parts, part_config
from enginegate.repository.store.layout import Current, Layout
from enginegate.triton.client import TritonClient
from enginegate.triton.config import Config, config_text
from enginegate.triton.ensemble_config import config_for_versions, with_largest_batch

_NONE: Mapping[str, set[int]] = {}
_log = logging.getLogger("enginegate.repository")


def part_configs(
    layout: Layout, current: Current, *, also: Mapping[str, set[int]] = _NONE
) -> dict[str, Config]:
    """What each part is told while ``current`` is live, in running order of the current release.

    A part takes the largest batch that any of its versions was published with: the ensemble that
    is pinned to one of them must never allow more than it does.

    Args:
        layout: of the ensemble.
        current: what is live.
        also: further versions to serve, by part.

    Raises:
        TamperedError: a part's published configuration is not what it was.
        RepositoryError: a version could not be loaded with the configuration of its part.
    """
    versions: dict[str, set[int]] = {}
    for version in reversed(current.served):
        for part in layout.release(version).parts:
            versions.setdefault(part.name, set()).add(version)
    for name in versions:
        versions[name] |= also.get(name, set())
    digests = known_digests(layout, current)
    configs = {
        name: config_for_versions(_shared(layout, name, served), tuple(served), digests)
        for name, served in versions.items()
    }
    for name, config in configs.items():
        check_loadable(layout.part(name), config)
    return configs


def right_files(layout: Layout, current: Current) -> dict[Path, bytes]:
    """Every configuration file, the ensemble's last: what each must hold."""
    files = {
        layout.part(name).config: config_text(config).encode()
        for name, config in part_configs(layout, current).items()
    }
    return {**files, layout.config: right_config(layout, current)}


def wrong_files(layout: Layout, current: Current) -> dict[Path, bytes]:
    """Those that hold something else, with what they must hold."""
    right = right_files(layout, current)
    return {path: content for path, content in right.items() if not _holds(path, content)}


def _holds(path: Path, content: bytes) -> bool:
    """Whether it is a file, and no link to one, with this content."""
    try:
        return read_file(path) == content
    except (FileNotFoundError, NotADirectoryError, NotRegularFileError):
        return False


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model and its parts on one live server. For a single engine there are no parts."""

    client: TritonClient
    layout: Layout
    load_timeout_s: float

    def ready_parts(self, current: Current) -> bool:
        """Let every part serve what ``current`` needs beside what it serves now.

        Returns:
            Whether there are parts.

        Raises:
            RepositoryError: a part does not serve it, or answers otherwise than validated.
            ServerError: one did not load, or the server does not answer.
        """
        parts = part_configs(self.layout, current, also=self._loaded())
        for name, config in parts.items():
            self._tell(name, config)
        self._prove_parts(current)
        return bool(parts)

    def flip(self, current: Current) -> None:
        """Load the model itself: traffic goes over."""
        self._own.load(served_config(self.layout, current))

    def prove(self, current: Current, *, wait: bool = True) -> None:
        """Prove that the model serves what ``current`` says, through its own endpoint.

        Raises:
            RepositoryError: something else serves.
            ServerError: the server does not answer.
        """
        self._own.prove(current, self.layout.release(current.version), wait=wait)

    def prove_all(self, current: Current) -> None:
        """The same now, and that each part serves exactly its versions."""
        self.prove(current, wait=False)
        for name, config in part_configs(self.layout, current).items():
            self._part(name).prove_ready(config.versions or (), wait=False)
        self._prove_parts(current)

    def check_settled(self, *, patience_s: float) -> None:
        """Refuse versions of the model or a part that keep loading, whether they serve or not.

        Args:
            patience_s: how long a load or unload may still take.

        Raises:
            RepositoryError: one neither ends nor fails; names it.
            ServerError: the server does not answer.
        """
        deadline_s = time.monotonic() + patience_s
        for live in (self._own, *(self._part(part.model) for part in owned_parts(self.layout))):
            live.check_settled(deadline_s, patience_s=patience_s)

    def trim(self, current: Current) -> None:
        """Let parts go of what neither the live release nor the standby needs.

        Raises:
            RepositoryError: one does not serve what is left.
            ServerError: one did not load, or the server does not answer.
        """
        wanted = part_configs(self.layout, current)
        for name, config in wanted.items():
            _put(self.layout.part(name).config, config_text(config).encode())
        for name, config in wanted.items():
            self._tell(name, config)
        for part in owned_parts(self.layout):
            if part.model not in wanted and self._part(part.model).is_loaded():
                self._part(part.model).unload()

    def trim_after_commit(self, current: Current) -> None:
        """The same where the change stands already: a part that stays loaded is only said."""
        try:
            self.trim(current)
        except (ServerError, RepositoryError) as error:
            _log.warning("old parts of %s stay loaded: %s", self.layout.model, error)

    def restore(self, current: Current) -> None:
        """Go over to ``current`` from wherever the server is, and prove it."""
        self.ready_parts(current)
        _put(self.layout.config, right_config(self.layout, current))
        self.flip(current)
        self.prove(current)
        self.trim(current)

    def take_away(self) -> None:
        """Unload the model if it is ours, then its parts (undoing a first release)."""
        own = (self._own,) if self.layout.is_ours else ()
        for live in (*own, *(self._part(part.model) for part in owned_parts(self.layout))):
            if live.is_loaded():
                live.unload()

    def prove_gone(self, *, wait: bool = True) -> None:
        """Prove that the model does not answer any more.

        Raises:
            RepositoryError: it does.
            ServerError: the server does not answer.
        """
        self._own.prove_gone(wait=wait)

    @property
    def _own(self) -> LiveModel:
        return LiveModel(self.client, self.layout, self.load_timeout_s)

    def _part(self, name: str) -> LiveModel:
        return LiveModel(self.client, self.layout.part(name), self.load_timeout_s)

    def _loaded(self) -> dict[str, set[int]]:
        """Versions of each part that answer now and whose bytes are here."""
        return {
            part.model: self._part(part.model).ready() & set(part.stored_versions())
            for part in owned_parts(self.layout)
        }

    def _tell(self, name: str, config: Config) -> None:
        _put(self.layout.part(name).config, config_text(config).encode())
        live = self._part(name)
        live.load(config)
        live.prove_ready(config.versions or (), wait=True)

    def _prove_parts(self, current: Current) -> None:
        """Those with validated answers of their own give them."""
        for part in self.layout.release(current.version).parts:
            if part.golden is not None:
                path = self.layout.part_file(current.version, part.name, "golden.npz")
                self._part(part.name).prove_answers(
                    Golden.read(path),
                    version=current.version,
                    max_abs_error=part.golden_max_abs_error,
                )


def go_to(
    client: TritonClient | None, layout: Layout, current: Current | None, load_timeout_s: float
) -> None:
    """Let folder and server be what ``current`` says, from whatever they are; None: nothing.

    Raises:
        RepositoryError: something else serves.
        ServerError: the server does not answer.
    """
    if client is None:
        _write_right(layout, current)
        return
    live = Deployment(client, layout, load_timeout_s)
    if current is not None:
        live.restore(current)
    else:
        live.take_away()


def finish(
    client: TritonClient | None, layout: Layout, current: Current, load_timeout_s: float
) -> None:
    """What is left to do after a commit: parts let go of what is not needed."""
    if client is None:
        _write_right(layout, current)
    else:
        Deployment(client, layout, load_timeout_s).trim_after_commit(current)


def _write_right(layout: Layout, current: Current | None) -> None:
    for path, content in (right_files(layout, current) if current else {}).items():
        write_file(path, content)


def _put(path: Path, content: bytes) -> None:
    """A server that polls reloads what was touched; a repository may be read-only and right."""
    if not _holds(path, content):
        write_file(path, content)


def _shared(layout: Layout, name: str, versions: set[int]) -> Config:
    """The configuration of a part's newest published version, for all of the versions."""
    published = [
        part_config(layout, version, part)
        for version in sorted(versions)
        for part in _parts_named(layout, version, name)
    ]
    largest = max(config.serving.max_batch_size for config in published)
    return with_largest_batch(published[-1], largest)


def _parts_named(layout: Layout, version: int, name: str) -> list[ComposingModel]:
    return [part for part in layout.release(version).parts if part.name == name]
