"""Kills one operation after another on a live repository, and looks at what each one left.

The parent's clients never stop. Every answer must carry the tag of the version that Triton says
gave it, and every number has one package only.
"""

import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from enginegate.loadgen.background_load import BackgroundLoad
from enginegate.loadgen.traffic import Traffic
from enginegate.repository import Layout
from enginegate.repository.rollout.rollout_state import LOCK, RolloutState
from enginegate.repository.store.live_record import LiveRecord
from enginegate.triton.client import TritonClient
from enginegate.triton.server import Server
from enginegate.triton.types import Reply
from tests.kills.fork_server import Ended, ForkServer
from tests.kills.job import REFUSED, Account, Job, Site, What
from tests.kills.kill_points import Death
from tests.kills.tagged import Order, made, samples, tag_in

_TAGS_A_NUMBER = 1000
# Whether these need a release that stands by: it goes first, or there is none that could.
WITH_STANDBY: dict[What, bool] = {"publish-tight": True, "publish-alone": False}


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
    """A live repository under attack, or a fleet of them.

    Attributes:
        server: the only one, or the first of a fleet.
        others: the other servers of a fleet, by name, in the order in which they are loaded on.
        canary_s: how long the first of a fleet is watched.
        folder: for packages and accounts, outside the repository.
        tags: what each release's answers must carry, by model and number.
        attempts: packages made.
        work_ms: how long each run of an engine takes besides.
        unfit: releases that a server of the fleet cannot load, by model and number.
    """

    server: Server
    forks: ForkServer
    folder: Path
    tags: dict[tuple[str, int], int] = field(default_factory=dict)
    attempts: int = 0
    work_ms: float = 0.0
    unfit: set[tuple[str, int]] = field(default_factory=set)
    others: dict[str, Server] = field(default_factory=dict)
    canary_s: float = 0.0

    @property
    def root(self) -> Path:
        """The repository; of a fleet the primary's."""
        return _root(self.server)

    @property
    def servers(self) -> dict[str, Server]:
        """All of them; the first has no name of its own."""
        return {"": self.server, **self.others}

    def check_alive(self) -> None:
        """Show the end of a dead server's log.

        Raises:
            ServerError: one has died.
        """
        for server in self.servers.values():
            server.check_alive()

    def begin(self, model: str, releases: int = 2) -> None:
        """Publish a model's first releases, undisturbed."""
        for number in range(releases):
            self._run(self._publishing("publish", model, number or None, Death()))

    def acts(self, what: What, model: str) -> int:
        """Durable acts of an undisturbed operation, which is done."""
        return self.undisturbed(what, model)[0]

    def undisturbed(self, what: What, model: str) -> tuple[int, float]:
        """Do an operation: its durable acts, and how many seconds it took."""
        ended = self._run(self._job(what, model, Death()))
        return self._told(ended).acts, ended.lasted_s

    def prepared(self, what: What, model: str) -> Callable[[], None]:
        """An undisturbed operation with all that it needs; calling it does it."""
        job = pickle.dumps(self._job(what, model, Death()))
        return lambda: self._finished(self.forks.run(job))

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
        target = job.to or LiveRecord.of(Layout(self.root, model)).last_number + 1
        ended = self._run(job, death.after_s if death.at == "instant" else None)
        on_disk = self._committed(model)
        recover = replace(job, what="recover", package=None, death=Death())
        if twice:
            self._run(replace(recover, death=Death("act", number=twice)))
        recovery = self._run(recover)
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
    def called(self, *models: str, rate_per_s: float) -> Iterator[tuple[BackgroundLoad, ...]]:
        """Clients that never stop, of each model on each server; all of a model together."""
        with ExitStack() as stack:
            yield tuple(
                stack.enter_context(
                    BackgroundLoad(
                        server.grpc,
                        Traffic.of(model, samples(model)),
                        rate_per_s=rate_per_s,
                        wrong_in=_Checking(model, self.tags),
                    )
                )
                for model in models
                for server in self.servers.values()
            )

    def _problems(
        self, job: Job, account: Account, before: int, target: int, on_disk: int
    ) -> Iterator[str]:
        """What verification said, and what is checked here without its help."""
        yield from account.problems
        if account.unfinished:
            yield f"{account.unfinished} operations are still open in the journal"
        allowed = {before} if job.what in REFUSED else {before, target}
        if account.live not in allowed:
            yield f"release {account.live} is live, which is none of {sorted(allowed)}"
        # If another server cannot load it, the primary has committed it and has to roll it back.
        if account.live != on_disk and job.what not in REFUSED:
            yield f"release {on_disk} was committed, and recovery made it {account.live}"
        for name, server in self.servers.items():
            of = f"{name}: " if name else ""
            yield from (f"{of}{problem}" for problem in self._served(server, job, account.live))
        for root in job.roots:
            left = [*root.parent.rglob(f".{job.model}-*"), *root.parent.rglob(".*.tmp")]
            left += [path for path in root.glob(".enginegate-fleet*") if path.name != LOCK]
            yield from (f"{path} was left" for path in dict.fromkeys(left))

    def _served(self, server: Server, job: Job, live: int | None) -> Iterator[str]:
        """Ask a server with our own client: what answers, and with which tag."""
        layouts = [Layout(root, job.model) for root in (job.root, _root(server))]
        current = [layout.current() for layout in layouts]
        if any(each is None or each.version != live for each in current):
            yield f"{layouts[-1].root} has {current[-1]} while release {live} is live"
        elif live is not None and len({each.release(live).digest for each in layouts}) > 1:
            yield f"release {live} is another one than the primary's"
        with TritonClient(server.grpc) as client:
            rows = [row for row in client.index() if row.name == job.model and row.ready]
            ready = {row.version for row in rows}
            if live not in ready or max(ready) != live:
                yield f"versions {sorted(ready)} are ready while release {live} is live"
            for sample, inputs in enumerate(samples(job.model, 2)):
                reply = client.infer(job.model, inputs)
                problem = _Checking(job.model, self.tags)(sample, reply)
                if problem or reply.model_version != str(live):
                    yield problem or f"version {reply.model_version} answers, not {live}"

    def _job(self, what: What, model: str, death: Death) -> Job:
        live = self._live(model)
        if what != "rollback":
            return self._publishing(what, model, live, death)
        layout = Layout(self.root, model)
        useless = {live} | {number for name, number in self.unfit if name == model}
        others = [version for version in layout.stored_versions() if version not in useless]
        if not others:  # retention has left only what another server cannot load
            self._run(self._publishing("publish", model, live, Death()))
        current = layout.current()
        to = current.standby if current and current.standby else others[-1]
        return self._asking(what, model=model, to=to, death=death)

    @property
    def _asking(self) -> Callable[..., Job]:
        """A job on these servers; what is to be done is still missing."""
        sites = [Site(name, _root(each), each.grpc) for name, each in self.others.items()]
        given = {"root": self.root, "address": self.server.grpc, "others": tuple(sites)}
        return partial(Job, canary_s=self.canary_s, **given)

    def _publishing(self, what: What, model: str, expected: int | None, death: Death) -> Job:
        current = Layout(self.root, model).current()
        stands_by = current is not None and current.standby is not None
        if what in WITH_STANDBY and stands_by is not WITH_STANDBY[what]:
            self._run(self._job("rollback" if stands_by else "publish", model, Death()))
            expected = self._live(model)
        number = LiveRecord.of(Layout(self.root, model)).last_number + 1
        self.attempts += 1
        tag = number * _TAGS_A_NUMBER + self.attempts % _TAGS_A_NUMBER
        self.tags[model, number] = tag
        folder = self.folder / "packages" / str(self.attempts)
        wrong = what == "publish-wrong"
        unfit = ""
        if what == "publish-unfit":
            self.unfit.add((model, number))
            unfit = f"{self._elsewhere}/"
        package = made(Order(folder, model, tag, wrong=wrong, work_ms=self.work_ms, unfit_in=unfit))
        return self._asking(what, model=model, package=package, expected=expected, death=death)

    @property
    def _elsewhere(self) -> Path:
        """The repository of the fleet's server that has its own."""
        return next(_root(each) for each in self.others.values() if _root(each) != self.root)

    def _committed(self, model: str) -> int:
        """What recovery has to make live: a canary that has not passed is to be rolled back."""
        live, progress = self._live(model), RolloutState(self.root).of(model)
        if progress is not None and progress.canary == live and not progress.canary_passed:
            return progress.before or 0
        return live

    def _live(self, model: str) -> int:
        current = Layout(self.root, model).current()
        return current.version if current else 0

    def _run(self, job: Job, kill_after_s: float | None = None) -> Ended:
        return self.forks.run(pickle.dumps(job), kill_after_s=kill_after_s)

    def _finished(self, ended: Ended) -> None:
        self._told(ended)

    def _told(self, ended: Ended) -> Account:
        account = pickle.loads(ended.account)  # noqa: S301 - our own child wrote it
        if not isinstance(account, Account):
            raise TypeError(f"A child left {account!r}.")
        return account


def _root(server: Server) -> Path:
    if server.repository is None:
        raise ValueError("The server must be one of ours.")
    return server.repository


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
