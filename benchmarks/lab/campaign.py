"""Kills one operation after another on a live repository, and looks at what each one left.

The parent's clients never stop. Every answer must carry the tag of the version that Triton says
gave it, and every number has one package only.
"""

import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.lab.dying import Death
from benchmarks.lab.job import Account, Job, What
from benchmarks.lab.nursery import Ended, Nursery
from benchmarks.lab.tagged import Order, made, samples, tag_in
from enginegate.repository import Layout
from enginegate.repository.copies import last_number
from enginegate.triton.answers import Reply
from enginegate.triton.callers import Callers
from enginegate.triton.client import TritonClient
from enginegate.triton.server import Server
from enginegate.triton.traffic import Traffic

_TAGS_A_NUMBER = 1000


@dataclass(frozen=True, slots=True)
class Killed:
    """One operation that was to be killed, and what it left.

    Attributes:
        cut: it was killed; else it had come to its end before.
        before: the release that was live.
        target: the release it would make live.
        after: the release that is live after recovery.
        recovered: recovery found something to do.
        problems: everything that was not as it should be; empty is good.
        recovery_s: recovery and verification in a fresh process.
    """

    what: What
    model: str
    death: str
    cut: bool
    before: int
    target: int
    after: int | None
    recovered: bool
    problems: tuple[str, ...]
    recovery_s: float


@dataclass(slots=True)
class Campaign:
    """A live repository under attack.

    Attributes:
        folder: for packages and accounts, outside the repository.
        tags: what each release's answers must carry, by model and number.
        attempts: packages made.
        work_ms: how long each run of an engine takes besides.
    """

    server: Server
    nursery: Nursery
    folder: Path
    tags: dict[tuple[str, int], int] = field(default_factory=dict)
    attempts: int = 0
    work_ms: float = 0.0

    @property
    def root(self) -> Path:
        """The repository."""
        if self.server.repository is None:
            raise ValueError("The server must be one of ours.")
        return self.server.repository

    def begin(self, model: str, releases: int = 2) -> None:
        """Publish a model's first releases, undisturbed."""
        for number in range(releases):
            self._run(self._publishing("publish", model, number or None, Death()))

    def acts(self, what: What, model: str) -> int:
        """Durable acts of an undisturbed operation, which is done."""
        return self._told(self._run(self._job(what, model, Death()))).acts

    def prepared(self, what: What, model: str) -> Callable[[], None]:
        """An undisturbed operation with all that it needs; calling it does it."""
        job = pickle.dumps(self._job(what, model, Death()))
        return lambda: self._finished(self.nursery.run(job))

    def kill(self, what: What, model: str, death: Death, *, twice: int = 0) -> Killed:
        """Do an operation that dies, recover in a fresh process, and look.

        Args:
            what: publish or roll back.
            model: which.
            death: where it dies.
            twice: recovery dies before this durable act first; 0: it does not.
        """
        job = self._job(what, model, death)
        before = self._live(model)
        target = job.to or last_number(Layout(self.root, model)) + 1
        ended = self._run(job, death.after_s if death.at == "instant" else None)
        on_disk = self._live(model)
        if twice:
            again = Death("act", number=twice)
            self._run(Job("recover", self.root, self.server.grpc, model, death=again))
        recovery = self._run(Job("recover", self.root, self.server.grpc, model))
        account = self._told(recovery)
        return Killed(
            what=what,
            model=model,
            death=f"{death}, recovery before act {twice}" if twice else str(death),
            cut=ended.killed,
            before=before,
            target=target,
            after=account.live,
            recovered=bool(account.said),
            problems=tuple(self._problems(job, account, before, target, on_disk)),
            recovery_s=recovery.lasted_s,
        )

    @contextmanager
    def called(self, *models: str, rate_per_s: float) -> Iterator[tuple[Callers, ...]]:
        """Clients that never stop, of each model."""
        with ExitStack() as stack:
            yield tuple(
                stack.enter_context(
                    Callers(
                        self.server.grpc,
                        Traffic.of(model, samples(model)),
                        rate_per_s,
                        wrong_in=_Checking(model, self.tags),
                    )
                )
                for model in models
            )

    def _problems(
        self, job: Job, account: Account, before: int, target: int, on_disk: int
    ) -> Iterator[str]:
        """What verification said, and what is looked at here without its help."""
        yield from account.problems
        if account.unfinished:
            yield f"{account.unfinished} operations are still open in the journal"
        allowed = {before} if job.what == "publish-wrong" else {before, target}
        if account.live not in allowed:
            yield f"release {account.live} is live, which is none of {sorted(allowed)}"
        if account.live != on_disk:
            yield f"release {on_disk} was committed, and recovery made it {account.live}"
        yield from self._served(job.model, account.live)
        left = [*self.root.parent.rglob(f".{job.model}-*"), *self.root.parent.rglob(".*.tmp")]
        yield from (f"{path} was left" for path in left)

    def _served(self, model: str, live: int | None) -> Iterator[str]:
        """Ask the server with our own client: what answers, and with which tag."""
        with TritonClient(self.server.grpc) as client:
            current = Layout(self.root, model).current()
            ready = {row.version for row in client.index() if row.name == model and row.ready}
            if current is None or live not in ready or max(ready) != live:
                yield f"versions {sorted(ready)} are ready while release {live} is live"
            for sample, inputs in enumerate(samples(model, 2)):
                problem = _Checking(model, self.tags)(sample, reply := client.infer(model, inputs))
                if problem or reply.model_version != str(live):
                    yield problem or f"version {reply.model_version} answers, not {live}"

    def _job(self, what: What, model: str, death: Death) -> Job:
        live = self._live(model)
        if what != "rollback":
            return self._publishing(what, model, live, death)
        layout = Layout(self.root, model)
        current = layout.current()
        others = [version for version in layout.stored_versions() if version != live]
        to = current.standby if current and current.standby else others[-1]
        return Job(what, self.root, self.server.grpc, model, to=to, death=death)

    def _publishing(self, what: What, model: str, expected: int | None, death: Death) -> Job:
        number = last_number(Layout(self.root, model)) + 1
        self.attempts += 1
        tag = number * _TAGS_A_NUMBER + self.attempts % _TAGS_A_NUMBER
        self.tags[model, number] = tag
        folder = self.folder / "packages" / str(self.attempts)
        wrong = what == "publish-wrong"
        package = made(Order(folder, model, tag, wrong=wrong, work_ms=self.work_ms))
        return Job(
            what, self.root, self.server.grpc, model, package, expected=expected, death=death
        )

    def _live(self, model: str) -> int:
        current = Layout(self.root, model).current()
        return current.version if current else 0

    def _run(self, job: Job, kill_after_s: float | None = None) -> Ended:
        return self.nursery.run(pickle.dumps(job), kill_after_s=kill_after_s)

    def _finished(self, ended: Ended) -> None:
        self._told(ended)

    def _told(self, ended: Ended) -> Account:
        account = pickle.loads(ended.account)  # noqa: S301 - our own child wrote it
        if not isinstance(account, Account):
            raise TypeError(f"A child left {account!r}.")
        return account


@dataclass(frozen=True, slots=True)
class _Checking:
    """What is wrong with an answer: the tag must be that of the version in its header."""

    model: str
    tags: dict[tuple[str, int], int]

    def __call__(self, sample: int, reply: Reply) -> str:
        wanted = self.tags.get((self.model, int(reply.model_version)))
        found = tag_in(self.model, sample, reply)
        if found == wanted:
            return ""
        return (
            f"{self.model}: an answer of version {reply.model_version} carries {found}, not "
            f"{wanted}"
        )
