"""One model on one live server: loading it, and the proof that it serves what it was told."""

import time
from dataclasses import dataclass
from functools import partial

from enginegate.data import Tensors
from enginegate.decision import Release
from enginegate.errors import RepositoryError, ServerError
from enginegate.repository.deploy.desired_config import served_versions
from enginegate.repository.store.golden import Golden
from enginegate.repository.store.layout import Current, Layout
from enginegate.triton.client import TritonClient
from enginegate.triton.config import Config
from enginegate.triton.release_labels import read_labels
from enginegate.triton.types import IndexRow, Reply

_POLL_S = 0.02
_MOVING = ("LOADING", "UNLOADING")
# What Triton answers to a load or unload in its POLL mode, and in NONE.
_POLLING = "explicit model load / unload is not allowed"


@dataclass(frozen=True, slots=True)
class LiveModel:
    """One model on one live server."""

    client: TritonClient
    layout: Layout
    load_timeout_s: float

    def load(self, config: Config) -> None:
        """Load what is on disk; the configuration travels too: Triton overlooks some changes.

        A server that polls its repository takes no such call: it is waited for.

        Raises:
            RepositoryError: a polling server did not take it up in time.
            ServerError: it did not load, or the server does not answer.
        """
        try:
            self.client.load(self.layout.model, config=config, timeout_s=self.load_timeout_s)
        except ServerError as error:
            if _POLLING not in str(error):
                raise
            self._wait_for_poll(config)

    def is_loaded(self) -> bool:
        """Whether any version of the model is ready."""
        return bool(self.ready())

    def unload(self) -> None:
        """Take the model away; a polling server does so when its folder is gone."""
        try:
            self.client.unload(self.layout.model)
        except ServerError as error:
            if _POLLING not in str(error):
                raise

    def prove(self, current: Current, release: Release, *, wait: bool = True) -> float:
        """Prove what serves: index, digest, version and golden answers. A status code proves
        nothing.

        Returns:
            The largest difference of a golden answer.

        Raises:
            RepositoryError: something else serves than ``current``.
            ServerError: the server does not answer.
        """
        self.prove_ready(served_versions(current, release), wait=wait)
        found = read_labels(self.client.config(self.layout.model)).get(current.version)
        if found != release.digest:
            raise RepositoryError(
                f"the server's configuration names release digest {found}, not {release.digest}"
            )
        golden = Golden.read(self.layout.golden_file(current.version))
        return golden.replay(
            self._ask, version=current.version, max_abs_error=release.engine.golden_max_abs_error
        )

    def prove_answers(self, golden: Golden, *, version: int, max_abs_error: float) -> float:
        """The same for one version that requests reach by its number only."""
        ask = partial(self._ask, version=str(version))
        return golden.replay(ask, version=version, max_abs_error=max_abs_error)

    def prove_ready(self, versions: tuple[int, ...], *, wait: bool) -> None:
        """Exactly these versions, no other: a higher one left over would take the traffic."""
        deadline = time.monotonic() + (self.load_timeout_s if wait else 0.0)
        while self.ready() != set(versions):
            if time.monotonic() > deadline:
                raise RepositoryError(
                    f"{self.layout.model}: versions {sorted(versions)} should be ready; the index "
                    f"says {self._states()}"
                )
            time.sleep(_POLL_S)

    def check_settled(self, deadline_s: float, *, patience_s: float) -> None:
        """Wait until no version is being loaded or unloaded.

        Args:
            deadline_s: until when, by the monotonic clock.
            patience_s: how long that is, for the message.

        Raises:
            RepositoryError: one still is.
        """
        while moving := [row for row in self._rows() if row.state in _MOVING]:
            if time.monotonic() > deadline_s:
                raise RepositoryError(
                    f"Version {moving[0].version} of {self.layout.model} is {moving[0].state} on "
                    f"the server at {self.client.address}, and was for the {patience_s:g} s that "
                    "it was watched. Until that ends the server loads nothing else of this model, "
                    "so no promotion or rollback can succeed. Check again; if nothing moves, its "
                    "log says more, and only starting the server again ends it."
                )
            time.sleep(_POLL_S)

    def prove_gone(self, *, wait: bool) -> None:
        """Prove that no version answers any more; a server that polls takes a while.

        Args:
            wait: for as long as a load may take.

        Raises:
            RepositoryError: one does.
            ServerError: the server does not answer.
        """
        ready = self.ready()
        deadline_s = time.monotonic() + (self.load_timeout_s if wait else 0.0)
        while ready:
            if time.monotonic() > deadline_s:
                raise RepositoryError(
                    f"{self.layout.model} was withdrawn, and the server at {self.client.address} "
                    f"still answers for it: {self._states()}. Unload it there, or start the server "
                    "again."
                )
            time.sleep(_POLL_S)
            ready = self.ready()

    def ready(self) -> set[int]:
        """Versions that answer requests."""
        return {row.version for row in self._rows() if row.ready}

    def _wait_for_poll(self, config: Config) -> None:
        deadline = time.monotonic() + self.load_timeout_s
        while not self._has(config):
            broken = [row for row in self._rows() if row.version in (config.versions or ())]
            broken = [row for row in broken if row.reason and row.reason != "unloaded"]
            late = time.monotonic() > deadline
            if late or any(row.state == "UNAVAILABLE" for row in broken):
                why = "did not load it" if broken else f"has not by {self.load_timeout_s:g} s"
                raise RepositoryError(
                    f"Triton at {self.client.address} polls its repository and {why}: "
                    f"{self._states()}. Its log says more. In its NONE mode it never does: start "
                    "it with --model-control-mode=explicit."
                )
            time.sleep(_POLL_S)

    def _has(self, config: Config) -> bool:
        """Whether a configuration is in force; a version that stayed may show an older policy."""
        try:
            found = read_labels(self.client.config(self.layout.model))
        except ServerError:
            return False
        ready = tuple(sorted(self.ready()))
        return read_labels(config) == found and config.versions == ready

    def _rows(self) -> list[IndexRow]:
        return [row for row in self.client.index() if row.name == self.layout.model]

    def _states(self) -> str:
        rows = self._rows()
        return "; ".join(f"version {r.version} {r.state} {r.reason}".strip() for r in rows)

    def _ask(self, inputs: Tensors, *, version: str = "") -> Reply:
        return self.client.infer(self.layout.model, inputs, version=version)
