"""Everything that a model's releases are promoted to, as promotion, rollback and watch see it."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from enginegate.decision import Release, RenewedPromise
from enginegate.repository.promotion import LiveRepository
from enginegate.repository.recovery import UNDONE, Withdrawal
from enginegate.repository.rollout.fleet_server import FleetServer
from enginegate.repository.rollout.rollout_state import RolloutProgress
from enginegate.repository.store.object_client import ObjectStore
from enginegate.repository.store.object_journal import Lease, ObjectJournal
from enginegate.repository.store.object_release import ObjectReleases, Pointer
from enginegate.repository.store.package import ImportedRelease, Package
from enginegate.triton.client import TritonClient


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
            RepositoryError: there is no such release, its bytes are gone, or another release is
                live than expected.
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
        """As above; ``checked``: whoever calls knows that there is no release to go back to."""

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
