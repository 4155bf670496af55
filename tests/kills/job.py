"""One operation on a live repository or a fleet, in a process of its own that may be killed."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from enginegate.errors import PublishError
from enginegate.policy.operating import Watch
from enginegate.repository import Fleet, Layout, LiveRepository, Package, verify
from enginegate.repository.deploy.gpu_room import GpuRoom
from enginegate.repository.history.journal import Journal
from enginegate.repository.rollout.canary import Canary
from enginegate.repository.rollout.target import FleetServer
from enginegate.triton.client import TritonClient
from enginegate.triton.gpu_memory import GpuMemory
from tests.kills.kill_points import Death, arm, sleep_or_die
from tests.kills.tagged import TAKES

What = Literal[
    "publish",
    "publish-tight",
    "publish-alone",
    "publish-wrong",
    "publish-unfit",
    "rollback",
    "recover",
]
REFUSED: tuple[What, ...] = ("publish-wrong", "publish-unfit")
_LOAD_TIMEOUT_S = 30.0
# Of a GPU that is made up: so much is free while a release takes `TAKES` of it. Then the one that
# stands by has to go first, or all that serves.
_FREE: dict[What, int] = {"publish-tight": 60, "publish-alone": 10}


@dataclass(frozen=True, slots=True)
class Site:
    """One more server of a fleet: with the primary's repository, or with its own."""

    name: str
    root: Path
    address: str


@dataclass(frozen=True, slots=True)
class Job:
    """What to do.

    Attributes:
        package: what to publish; one that answers wrongly, or that a server of the fleet cannot
            load, must be refused.
        expected: the release that is live.
        to: the release to roll back to.
        others: the other servers of a fleet, in the order in which they are loaded on.
        canary_s: how long the first server is watched.
    """

    what: What
    root: Path
    address: str
    model: str
    package: Package | None = None
    expected: int | None = None
    to: int | None = None
    death: Death = field(default_factory=Death)
    others: tuple[Site, ...] = ()
    canary_s: float = 0.0

    @property
    def roots(self) -> tuple[Path, ...]:
        """Every repository, the primary's first."""
        return tuple(dict.fromkeys([self.root, *(site.root for site in self.others)]))


@dataclass(frozen=True, slots=True)
class Account:
    """What a process that lived has to tell.

    Attributes:
        acts: durable acts of the operation.
        said: what recovery said.
        problems: what verification found, of folder, journal, audit log and server.
        live: the current release, by its file.
        unfinished: operations that the journals have left open.
    """

    acts: int
    said: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    live: int | None = None
    unfinished: int = 0


def perform(job: Job) -> Account:
    """Do it, or die on the way."""
    counter = arm(job.death)
    with _opened(job) as repository:
        if job.what == "recover":
            return _recovered(repository, job, acts=lambda: counter.acts)
        if job.what == "rollback":
            repository.rollback(job.model, job.to, reason="a measurement")
        elif job.package is not None:
            _publish(repository, job.package, job.expected, wrong=job.what in REFUSED)
        return Account(acts=counter.acts)


@contextmanager
def _opened(job: Job) -> Iterator[LiveRepository | Fleet]:
    """What a policy's target would be, with the canary that a library caller gets."""
    with ExitStack() as stack:
        client = stack.enter_context(TritonClient(job.address))
        free = _FREE.get(job.what)
        gpus = () if free is None else (GpuMemory(0, 10 * TAKES, 10 * TAKES - free),)
        room = GpuRoom("replace", lambda: gpus)
        primary = LiveRepository(job.root, client, load_timeout_s=_LOAD_TIMEOUT_S, gpu_room=room)
        if not job.others:
            yield primary
            return
        servers = []
        for site in job.others:
            client = stack.enter_context(TritonClient(site.address))
            own = replace(primary, root=site.root, client=client)
            servers.append(FleetServer(site.name, own, primary))
        canary = Canary(
            primary,
            job.model,
            Watch(),
            sleep=partial(sleep_or_die, job.death),
        )
        yield Fleet(primary, tuple(servers), canary_s=job.canary_s, analyse_canary=canary.analyse)


def _publish(
    repository: LiveRepository | Fleet, package: Package, expected: int | None, *, wrong: bool
) -> None:
    try:
        repository.publish(package, expected=expected)
    except PublishError:
        if not wrong:
            raise
        return
    if wrong:
        raise AssertionError("A release that should have been refused was accepted.")


def _recovered(repository: LiveRepository | Fleet, job: Job, *, acts: Callable[[], int]) -> Account:
    said = repository.recover()
    done = acts()
    checks = verify(repository)
    current = Layout(job.root, job.model).current()
    return Account(
        acts=done,
        said=said,
        problems=tuple(f"{c.subject}: {c.problem}" for c in checks if c.problem),
        live=current.version if current else None,
        unfinished=sum(len(Journal(root).unfinished()) for root in job.roots),
    )
