"""One live model with all it is made of: a single engine, or an ensemble and its composing models.

An ensemble goes over in an order in which it always finds the versions it is pinned to: composing
models serve the old and the new version, the ensemble is flipped, then they unload the rest.
Unloading a version that a live ensemble is pinned to would take it down, and so would a flip to
one that is not loaded.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from enginegate.decision import Release
from enginegate.errors import RepositoryError, ServerError
from enginegate.repository.deploy.desired_config import (
    part_configs,
    put,
    right_config,
    served_config,
    served_versions,
)
from enginegate.repository.deploy.memory import Room
from enginegate.repository.store.golden import Golden
from enginegate.repository.store.layout import Current, Layout
from enginegate.triton.client import TritonClient
from enginegate.triton.config import Config, config_text
from enginegate.triton.release_labels import read_labels
from enginegate.triton.types import IndexRow

_log = logging.getLogger("enginegate.repository")
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

    def unload(self) -> None:
        """Take the model away; a polling server does so when its folder is gone."""
        try:
            self.client.unload(self.layout.model)
        except ServerError as error:
            if _POLLING not in str(error):
                raise

    def unload_now(self) -> None:
        """Take the model away; a server that polls its repository cannot be told to.

        Raises:
            RepositoryError: it polls.
            ServerError: the server does not answer.
        """
        try:
            self.client.unload(self.layout.model)
        except ServerError as error:
            if _POLLING not in str(error):
                raise
            raise RepositoryError(
                f"Triton at {self.client.address} polls its repository, so {self.layout.model} "
                "cannot be unloaded before its successor comes. Free GPU memory there, or start "
                "it with --model-control-mode=explicit."
            ) from error

    def prove(self, current: Current, release: Release, *, wait: bool) -> None:
        """Index, digest, version and golden answers. A status code proves nothing."""
        self.prove_ready(served_versions(current, release), wait=wait)
        found = read_labels(self.client.config(self.layout.model)).get(current.version)
        if found != release.digest:
            raise RepositoryError(
                f"the server's configuration names release digest {found}, not {release.digest}"
            )
        golden = Golden.read(self.layout.golden_file(current.version))
        self.prove_answers(golden, current.version, release.engine.golden_max_abs_error)

    def prove_answers(
        self, golden: Golden, version: int, max_abs_error: float, *, asked: str = ""
    ) -> None:
        """A version gives the validated answers; ``asked``: it is reached by its number only."""
        golden.replay(
            lambda inputs: self.client.infer(self.layout.model, inputs, version=asked),
            version=version,
            max_abs_error=max_abs_error,
        )

    def prove_ready(self, versions: tuple[int, ...], *, wait: bool) -> None:
        """Exactly these versions, no other: a higher one left over would take the traffic."""
        if not self._becomes(lambda: self.ready() == set(versions), wait=wait):
            raise RepositoryError(
                f"{self.layout.model}: versions {sorted(versions)} should be ready; the index says "
                f"{self._states()}"
            )

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
        """No version answers any more; a server that polls takes a while."""
        if not self._becomes(lambda: not self.ready(), wait=wait):
            raise RepositoryError(
                f"{self.layout.model} was withdrawn, and the server at {self.client.address} still "
                f"answers for it: {self._states()}. Unload it there, or start the server again."
            )

    def _becomes(self, is_so: Callable[[], bool], *, wait: bool) -> bool:
        """Whether something is so, now or within the time that a load may take."""
        deadline_s = time.monotonic() + (self.load_timeout_s if wait else 0.0)
        while not (found := is_so()) and time.monotonic() <= deadline_s:
            time.sleep(_POLL_S)
        return found

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


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model, and an ensemble's composing models, on one live server."""

    client: TritonClient
    layout: Layout
    load_timeout_s: float

    def ready_parts(self, current: Current) -> bool:
        """Let every composing model serve what ``current`` needs beside what it serves now.

        Returns:
            Whether there are composing models.

        Raises:
            RepositoryError: one does not serve it, or answers otherwise than validated.
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
        """The same now, and that each composing model serves exactly its versions."""
        self.prove(current, wait=False)
        for name, config in part_configs(self.layout, current).items():
            self._part(name).prove_ready(config.versions or (), wait=False)
        self._prove_parts(current)

    def serves(self, current: Current) -> bool:
        """Whether it proves now that it serves what ``current`` says, and nothing else."""
        try:
            self.prove_all(current)
        except (ServerError, RepositoryError):
            return False
        return True

    def check_settled(self, *, patience_s: float) -> None:
        """Refuse versions of this or a composing model that keep loading, serving or not.

        Args:
            patience_s: how long a load or unload may still take.

        Raises:
            RepositoryError: one neither ends nor fails; names it.
            ServerError: the server does not answer.
        """
        deadline_s = time.monotonic() + patience_s
        for live in self._all:
            live.check_settled(deadline_s, patience_s=patience_s)

    def trim(self, current: Current) -> None:
        """Unload from composing models what neither the live release nor the standby needs.

        Raises:
            RepositoryError: one does not serve what is left.
            ServerError: one did not load, or the server does not answer.
        """
        wanted = part_configs(self.layout, current)
        for name, config in wanted.items():
            put(self.layout.part(name).config, config_text(config).encode())
        for name, config in wanted.items():
            self._tell(name, config)
        for part in self.layout.owned_parts():
            if part.model not in wanted and self._part(part.model).ready():
                self._part(part.model).unload()

    def trim_after_commit(self, current: Current) -> None:
        """Trim where the change stands already: a model that stays loaded is only logged."""
        try:
            self.trim(current)
        except (ServerError, RepositoryError) as error:
            _log.warning("old composing models of %s stay loaded: %s", self.layout.model, error)

    def loaded(self) -> set[int]:
        """Versions of the model itself that answer now."""
        return self._own.ready()

    def make_room(self, live: Current, room: Room) -> None:
        """Unload what a release cannot be loaded beside, and wait until it is gone.

        Args:
            live: what is live.
            room: without the standby, the live release goes on serving; alone, nothing does.

        Raises:
            RepositoryError: it does not end, or the server polls and takes no such call.
            ServerError: the server does not answer.
        """
        if room is Room.WITHOUT_STANDBY:
            only = live.model_copy(update={"standby": None})
            put(self.layout.config, right_config(self.layout, only))
            self.flip(only)
            self.trim(only)
        elif room is Room.ALONE:
            for each in self._all:
                if each.ready():
                    each.unload_now()
        self.check_settled(patience_s=self.load_timeout_s)

    def restore(self, current: Current, room: Room = Room.BESIDE) -> None:
        """Go over to ``current`` from wherever the server is, and prove it.

        Args:
            current: what is live.
            room: what has to be unloaded first.
        """
        if room is not Room.BESIDE:
            self.make_room(current, room)
        self.ready_parts(current)
        put(self.layout.config, right_config(self.layout, current))
        self.flip(current)
        self.prove(current)
        self.trim(current)

    def unload(self) -> None:
        """Unload the model if it is ours, then its composing models (undoing a first release)."""
        own = (self._own,) if self.layout.is_ours else ()
        for live in (*own, *(self._part(part.model) for part in self.layout.owned_parts())):
            if live.ready():
                live.unload()

    def prove_gone(self, *, wait: bool = True) -> None:
        """Prove that the model does not answer any more.

        Raises:
            RepositoryError: it does.
            ServerError: the server does not answer.
        """
        self._own.prove_gone(wait=wait)

    @property
    def _all(self) -> tuple[LiveModel, ...]:
        """The model, then its composing models: an ensemble goes before what it is made of."""
        parts = (self._part(part.model) for part in self.layout.owned_parts())
        return (self._own, *parts)

    @property
    def _own(self) -> LiveModel:
        return LiveModel(self.client, self.layout, self.load_timeout_s)

    def _part(self, name: str) -> LiveModel:
        return LiveModel(self.client, self.layout.part(name), self.load_timeout_s)

    def _loaded(self) -> dict[str, set[int]]:
        """Versions of each composing model that answer now and whose bytes are here."""
        return {
            part.model: self._part(part.model).ready() & set(part.stored_versions())
            for part in self.layout.owned_parts()
        }

    def _tell(self, name: str, config: Config) -> None:
        put(self.layout.part(name).config, config_text(config).encode())
        live = self._part(name)
        live.load(config)
        live.prove_ready(config.versions or (), wait=True)

    def _prove_parts(self, current: Current) -> None:
        """Those with validated answers of their own give them."""
        for part in self.layout.release(current.version).engine.parts:
            if part.golden is not None:
                path = self.layout.part_file(current.version, part.name, "golden.npz")
                self._part(part.name).prove_answers(
                    Golden.read(path),
                    current.version,
                    part.golden_max_abs_error,
                    asked=str(current.version),
                )
