"""One operation on a live repository, done in a process of its own that may be killed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.lab.dying import Death, arm
from enginegate.errors import PublishError
from enginegate.repository import Layout, LiveRepository, Package, verify
from enginegate.repository.journal import Journal
from enginegate.repository.layout import JOURNAL
from enginegate.triton.client import TritonClient

What = Literal["publish", "publish-wrong", "rollback", "recover"]
_LOAD_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Job:
    """What to do.

    Attributes:
        package: what to publish; one that answers wrongly must be refused.
        expected: the release that is live.
        to: the release to go back to.
    """

    what: What
    root: Path
    address: str
    model: str
    package: Package | None = None
    expected: int | None = None
    to: int | None = None
    death: Death = field(default_factory=Death)


@dataclass(frozen=True, slots=True)
class Account:
    """What a process that lived has to tell.

    Attributes:
        acts: durable acts of the operation.
        said: what recovery said.
        problems: what verification found, of folder, journal, audit log and server.
        live: the current release, by its file.
        unfinished: operations that the journal has left open.
    """

    acts: int
    said: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    live: int | None = None
    unfinished: int = 0


def perform(job: Job) -> Account:
    """Do it, or die on the way."""
    counter = arm(job.death)
    with TritonClient(job.address) as client:
        repository = LiveRepository(job.root, client, load_timeout_s=_LOAD_TIMEOUT_S)
        if job.what == "recover":
            return _recovered(repository, job.model, acts=lambda: counter.acts)
        if job.what == "rollback":
            repository.rollback(job.model, job.to, reason="a measurement")
        elif job.package is not None:
            _publish(repository, job.package, job.expected, wrong=job.what == "publish-wrong")
        return Account(acts=counter.acts)


def _publish(
    repository: LiveRepository, package: Package, expected: int | None, *, wrong: bool
) -> None:
    try:
        repository.publish(package, expected=expected)
    except PublishError:
        if not wrong:
            raise
        return
    if wrong:
        raise AssertionError("A release that answers wrongly was accepted.")


def _recovered(repository: LiveRepository, model: str, *, acts: Callable[[], int]) -> Account:
    said = repository.recover()
    done = acts()
    checks = verify(repository)
    current = Layout(repository.root, model).current()
    return Account(
        acts=done,
        said=said,
        problems=tuple(f"{c.subject}: {c.problem}" for c in checks if c.problem),
        live=current.version if current else None,
        unfinished=len(Journal(repository.root / JOURNAL).unfinished()),
    )
