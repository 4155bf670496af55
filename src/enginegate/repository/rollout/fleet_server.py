"""One more server of a fleet: with a live repository of its own, or with the primary's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from enginegate.decision import Release
from enginegate.errors import EnginegateError, RepositoryError
from enginegate.repository.lock import hold_lock
from enginegate.repository.promotion import LiveRepository
from enginegate.repository.recovery import UNDONE, Withdrawal
from enginegate.repository.store.layout import Current, Layout, models
from enginegate.repository.store.package import ImportedRelease

_LOCK_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class FleetServer:
    """A server that replicates the primary.

    Attributes:
        repository: what it serves; the primary's folder, or its own.
        primary: the primary's repository.
    """

    name: str
    repository: LiveRepository
    primary: LiveRepository

    @property
    def shares(self) -> bool:
        """Whether it serves the primary's folder."""
        return self.repository.root == self.primary.root

    def models(self) -> tuple[str, ...]:
        """Names of the models that were published on it."""
        return models(self.repository.root)

    def answers(self) -> bool:
        """Whether its server is there."""
        return self.repository.client is not None and self.repository.client.live()

    def serves(self, model: str, version: int | None) -> bool:
        """Whether its server proves now that it serves this release."""
        return self._live(model) == version and self.repository.serves(model)

    def has_live(self, model: str) -> bool:
        """Whether its folder says that a release is live."""
        return self._live(model) is not None

    def check_expected(self, model: str, expected: int | None) -> None:
        """Refuse to begin where another release is live than on the primary.

        Raises:
            RepositoryError: another is.
        """
        live = self._live(model)
        if live != expected:
            raise RepositoryError(
                f"Server {self.name!r} has release {live or 'none'} of {model} in "
                f"{self.repository.root}; this promotion was prepared while {expected or 'none'} "
                "was live. Bring it to the primary's with `enginegate verify --repair`, then "
                "promote again."
            )

    def replicate(self, release: Release) -> None:
        """Load and prove a release that the primary serves already.

        Raises:
            RepositoryError: it does not prove itself, or cannot be copied.
            ServerError: the server does not answer, or does not load it.
        """
        here = Layout(self.repository.root, release.model)
        current = here.current()
        if self.shares or (current is not None and current.version == release.version):
            if not self.repository.serves(release.model):
                self.repository.bring_up(release.model)
        elif current is not None and here.version_folder(release.version).is_dir():
            self.repository.rollback(release.model, release.version)
        else:
            expected = current.version if current else None
            self.repository.publish(ImportedRelease(release, self.primary.root), expected=expected)

    def roll_back(self, model: str, before: Current | None, *, by: Withdrawal = UNDONE) -> None:
        """Serve again what was live; before the first release that is nothing.

        The primary's folder still says otherwise then: a server that shares it is changed directly.

        Raises:
            RepositoryError, ServerError: it could not be, or does not prove itself.
        """
        layout = Layout(self.repository.root, model)
        if self.shares:
            self._change_server(layout, before)
            return
        current = layout.current()
        if current is None:
            return
        if before is None:
            self.repository.withdraw_version(model, current.version, by=by)
        elif current.version != before.version:
            self.repository.rollback(model, before.version)
        elif not self.repository.serves(model):
            self.repository.bring_up(model)

    def withdraw(self, model: str, *, by: Withdrawal) -> None:
        """Serve nothing of a model that is withdrawn, and prove it.

        A server that shares the primary's folder and polls it unloads the model when the folder
        has it no more: its proof is for afterwards (`check_gone`).

        Raises:
            RepositoryError, ServerError: it could not be, or the model still answers.
        """
        self.roll_back(model, None, by=by)
        if not self.shares:
            self.check_gone(model)

    def check_gone(self, model: str) -> None:
        """Prove that no version of a model answers any more.

        Raises:
            RepositoryError: one does, after the time that a load may take.
            ServerError: the server does not answer.
        """
        self.repository.deployment(Layout(self.repository.root, model)).prove_gone()

    def _change_server(self, layout: Layout, before: Current | None) -> None:
        live = self.repository.deployment(layout)
        with hold_lock(layout.root, timeout_s=_LOCK_TIMEOUT_S):
            if before is not None:
                live.restore(before)
            else:
                live.unload()

    def _live(self, model: str) -> int | None:
        current = Layout(self.repository.root, model).current()
        return current.version if current else None


def each_of(
    servers: Sequence[FleetServer], do: Callable[[FleetServer], object], failed: dict[str, str]
) -> list[str]:
    """Do something on every server; the names where it worked, and why not in ``failed``."""
    reached = []
    for server in servers:
        try:
            do(server)
            reached.append(server.name)
        except EnginegateError as error:
            failed[server.name] = str(error)
    return reached


def lines(failed: dict[str, str]) -> str:
    """Each server that failed, and why."""
    return "\n".join(f"  {name}: {why}" for name, why in failed.items())
