"""One live model with everything it is made of: a single engine, or an ensemble and its parts.

An ensemble goes over in an order in which it always finds the versions it is pinned to: the parts
serve the old and the new version, then the ensemble is flipped, then the parts let go of the rest.
Unloading a version that a live ensemble is pinned to would take it down, and so would a flip to
one that is not loaded.
"""

import logging
import time
from dataclasses import dataclass

from enginegate.errors import RepositoryError, ServerError
from enginegate.repository.deploy.desired_config import (
    part_configs,
    put,
    right_config,
    served_config,
)
from enginegate.repository.deploy.live_model import LiveModel
from enginegate.repository.store.golden import Golden
from enginegate.repository.store.layout import Current, Layout
from enginegate.triton.client import TritonClient
from enginegate.triton.config import Config, config_text

_log = logging.getLogger("enginegate.repository")


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
        for live in (self._own, *(self._part(part.model) for part in self.layout.owned_parts())):
            live.check_settled(deadline_s, patience_s=patience_s)

    def trim(self, current: Current) -> None:
        """Let parts go of what neither the live release nor the standby needs.

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
        put(self.layout.config, right_config(self.layout, current))
        self.flip(current)
        self.prove(current)
        self.trim(current)

    def take_away(self) -> None:
        """Unload the model if it is ours, then its parts (undoing a first release)."""
        own = (self._own,) if self.layout.is_ours else ()
        for live in (*own, *(self._part(part.model) for part in self.layout.owned_parts())):
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
                    version=current.version,
                    max_abs_error=part.golden_max_abs_error,
                )
