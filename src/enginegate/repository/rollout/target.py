"""Everything that a model's releases are promoted to, as promotion, rollback and watch see it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from enginegate.decision import Release, RenewedPromise
from enginegate.errors import EnginegateError, RepositoryError
from enginegate.object_storage import ObjectStore
from enginegate.repository.lock import hold_lock
from enginegate.repository.promotion import LiveRepository
from enginegate.repository.recovery import UNDONE, Withdrawal
from enginegate.repository.rollout.rollout_state import RolloutProgress
from enginegate.repository.store.layout import Current, Layout, models
from enginegate.repository.store.object_journal import Lease, ObjectJournal
from enginegate.repository.store.object_release import ObjectReleases, Pointer
from enginegate.repository.store.package import ImportedRelease, Package
from enginegate.triton.client import TritonClient

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
                self.repository.restore(live, before)
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


class Target(Protocol):
    """One server, a fleet, or object storage before either: changed by the same verbs."""

    @property
    def root(self) -> Path:
        """This host's repository; a fleet's is the primary's."""

    @property
    def client(self) -> TritonClient | None:
        """This host's server, a fleet's primary one; None: it does not answer."""

    @property
    def primary(self) -> LiveRepository:
        """This host's repository with its server."""

    @property
    def servers(self) -> tuple[FleetServer, ...]:
        """The servers that replicate the primary."""

    @property
    def storage(self) -> "StoredTarget | None":
        """The object storage that this host replicates."""

    def publish(self, package: Package, *, expected: int | None) -> Release:
        """Make a package the live release, or leave everything as it was.

        Raises:
            RepositoryBusyError: somebody else is changing this model.
            RepositoryError: another release is live than expected, or a server does not answer.
            PublishError: something went wrong on the way and was undone.
        """

    def rollback(
        self, model: str, to: int | None = None, *, reason: str = "", expected: int | None = None
    ) -> Release:
        """Make an earlier release live again: by default the one that the live one replaced.

        Raises:
            RollbackTargetError: there is no such release, it is live, or its bytes are gone.
            RepositoryError: there is none to go back to, or another one is live than expected.
            NotEverywhereError: it is live, but a server does not serve it.
            PublishError: it did not prove itself; the release that was live is live again.
        """

    def roll_back_promotion(self, model: str, version: int) -> str:
        """Leave a release whose promotion failed after it was published; what is live then."""

    def withdraw(self, model: str, by: Withdrawal) -> Release:
        """Unload the live release that nothing was before, and leave nothing live.

        Raises:
            RepositoryError: nothing is live, a server does not answer, or there is a release to go
                back to.
        """

    def renew(self, renewed: RenewedPromise) -> RenewedPromise:
        """Hold the live release to another promise from now on; nothing is loaded."""

    def recover(self) -> tuple[str, ...]:
        """Finish or undo what a killed process left; one sentence for each thing done."""

    def repair(self) -> tuple[str, ...]:
        """Recover, put back what is not as published, and load what does not serve."""

    def serves(self, model: str) -> bool:
        """Whether every server proves now that it serves what is live."""

    def bring_up(self, model: str) -> Release:
        """Load what is live on servers that have just started, and prove it.

        Raises:
            RepositoryError: nothing is live, or it does not prove itself.
            NotEverywhereError: a server of a fleet could not be brought to it.
        """


class StoredTarget(Target, Protocol):
    """Object storage, and this host's servers that replicate it."""

    @property
    def model(self) -> str:
        """The one model whose releases are there."""

    @property
    def store(self) -> ObjectStore:
        """Where they are."""

    @property
    def releases(self) -> ObjectReleases:
        """The releases in storage."""

    @property
    def journal(self) -> ObjectJournal:
        """Who is changing them, and every step taken."""

    def current(self) -> Pointer | None:
        """What is live in storage; None before the first release."""

    def pull(self) -> Release | None:
        """Bring this host to what is live in storage; None where nothing is."""


class LocalTarget(Target, Protocol):
    """This host's servers, which object storage may be before: one server, or a fleet."""

    def leased(self, lease: Lease) -> "LocalTarget":
        """Let the analysis of the canary be cancelled by a lease too."""

    def without_canary(self) -> "LocalTarget":
        """The same servers, changed at once."""

    def through(self, channel: str) -> "LocalTarget":
        """The same servers, changed through a channel that the audit log names."""

    def publish(
        self,
        package: Package | ImportedRelease,
        *,
        expected: int | None,
        version: int | None = None,
        placed: Callable[[Release], None] | None = None,
    ) -> Release:
        """Publish as above.

        Args:
            package: what to publish; a release from elsewhere keeps its number.
            expected: the release that was live when this was prepared.
            version: the number to publish under, where another place issues them.
            placed: called when the bytes are here and nothing serves them yet.
        """

    def publish_again(self, model: str, version: int, *, reason: str = "") -> Release:
        """Make a release live whose bytes are here, with the analysis that a new one gets."""

    def withdraw(self, model: str, by: Withdrawal, *, checked: bool = False) -> Release:
        """As above; ``checked``: whoever calls knows that there is no release to roll back to."""

    def withdraw_version(self, model: str, version: int, *, by: Withdrawal = UNDONE) -> str:
        """Leave nothing live; what is live now, in words."""

    def renew(self, renewed: RenewedPromise, *, new: bool = True) -> RenewedPromise:
        """As above; ``new``: it is signed here, else it came with a signature from elsewhere."""

    def cancel_rollout(
        self, model: str, may: Callable[[RolloutProgress], bool] = lambda _: True
    ) -> RolloutProgress | None:
        """Cancel the analysis of a canary that is under way here, then recover.

        Args:
            model: of which model.
            may: whether a roll-out may be cancelled.

        Returns:
            The roll-out that was cancelled.

        Raises:
            RepositoryBusyError: a roll-out goes on.
        """
