"""What Triton is told about a model's releases, and the proof that it does so.

The configuration is a pure function of the commit point and the manifests, so that any state can be
restored, and any file on disk checked, without remembering the text.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from enginegate.data import Tensors
from enginegate.decision import Release
from enginegate.errors import RepositoryError
from enginegate.repository.golden import Golden
from enginegate.repository.layout import Current, Layout
from enginegate.triton.answers import Reply
from enginegate.triton.client import TritonClient
from enginegate.triton.config import Config, config_text, model_config

_POLL_S = 0.02


def release_parameter(version: int) -> str:
    """The configuration parameter that holds a release's digest."""
    return f"enginegate.release.{version}"


def served_config(current: Current, releases: Mapping[int, Release]) -> Config:
    """The model's configuration while ``current`` is live.

    Batching and instances are those of the current release. The digests of every known release
    stand in the parameters: Triton changes a version policy in place, but reloads when a parameter
    changes, so the same set before and after makes a rollback instant.
    """
    release = releases[current.version]
    return model_config(
        name=release.model,
        inputs=release.inputs,
        outputs=release.outputs,
        serving=release.serving,
        backend=release.backend,
        parameters={release_parameter(v): releases[v].digest for v in current.known},
        versions=current.served,
        gpu=release.gpu,
    )


def known_releases(layout: Layout, current: Current) -> dict[int, Release]:
    """The manifests that the configuration of ``current`` is made from."""
    return {version: layout.release(version) for version in {*current.known, current.version}}


def right_config(layout: Layout, current: Current) -> bytes:
    """What ``config.pbtxt`` must hold while ``current`` is live."""
    return config_text(served_config(current, known_releases(layout, current))).encode()


def config_is_right(layout: Layout, current: Current) -> bool:
    """Whether ``config.pbtxt`` holds exactly that."""
    return layout.config.is_file() and layout.config.read_bytes() == right_config(layout, current)


@dataclass(frozen=True, slots=True)
class LiveModel:
    """One model on one live server."""

    client: TritonClient
    layout: Layout
    load_timeout_s: float

    def load(self, config: Config) -> None:
        """Load what is on disk; the configuration travels too: Triton overlooks some changes."""
        self.client.load(self.layout.model, config=config, timeout_s=self.load_timeout_s)

    def is_loaded(self) -> bool:
        """Whether any version of the model is ready."""
        return bool(self._ready())

    def unload(self) -> None:
        """Take the model away (undoing a first release)."""
        self.client.unload(self.layout.model)

    def prove(self, current: Current, release: Release, *, wait: bool = True) -> float:
        """Prove what serves: index, digest, version and golden answers. A status code proves
        nothing.

        Returns:
            The largest difference of a golden answer.

        Raises:
            RepositoryError: something else serves than ``current``.
            ServerError: the server does not answer.
        """
        self._wait_until_ready(current, self.load_timeout_s if wait else 0.0)
        found = self.client.parameters(self.layout.model).get(release_parameter(current.version))
        if found != release.digest:
            raise RepositoryError(
                f"the server's configuration names release digest {found}, not {release.digest}"
            )
        golden = Golden.read(self.layout.golden_file(current.version))
        return golden.replay(
            self._ask, version=current.version, max_abs_error=release.golden_max_abs_error
        )

    def _wait_until_ready(self, current: Current, timeout_s: float) -> None:
        """Exactly the served versions, no other: a higher one left over would take the traffic."""
        wanted = set(current.served)
        deadline = time.monotonic() + timeout_s
        while self._ready() != wanted:
            if time.monotonic() > deadline:
                raise RepositoryError(self._not_ready(wanted))
            time.sleep(_POLL_S)

    def _ready(self) -> set[int]:
        rows = self.client.index()
        return {row.version for row in rows if row.name == self.layout.model and row.ready}

    def _not_ready(self, wanted: set[int]) -> str:
        states = [
            f"version {row.version} {row.state} {row.reason}".strip()
            for row in self.client.index()
            if row.name == self.layout.model
        ]
        return f"versions {sorted(wanted)} should be ready; the index says {'; '.join(states)}"

    def _ask(self, inputs: Tensors) -> Reply:
        return self.client.infer(self.layout.model, inputs)
