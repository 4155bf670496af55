"""Does this server keep what promotions rely on? Proved on it, with a model of our own.

Triton's documentation withdrew its promise of a reload without loss in January 2026, and versions
differ: so each promise is tried out under load. No other model is touched.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from enginegate.contract.probe_model import BROKEN, SOURCE, ProbeModel
from enginegate.errors import ServerError
from enginegate.evidence import Outcome
from enginegate.loadgen.callers import Callers
from enginegate.loadgen.traffic import Traffic
from enginegate.records import Record
from enginegate.triton.client import TritonClient
from enginegate.triton.types import Reply

_SAMPLES = 16
_ASKS = 5
_RATE_PER_S = 50.0
_LOAD_TIMEOUT_S = 60.0
_SETTLE_S = 0.25
_GONE_S = 10.0
_NOT_EXPLICIT = "explicit model load / unload is not allowed"
_NO_PYTHON = "unable to find backend library"
# 1 - 0.05 ** (1 / N) is about 3 / N.
_RULE_OF_THREE = 3.0


class ContractCheck(Record):
    """One promise, and whether this server kept it."""

    promise: str
    outcome: Outcome
    reason: str


def check_contract(
    address: str,
    *,
    repository: Path | None = None,
    switches: int = 3,
    rate_per_s: float = _RATE_PER_S,
    load_timeout_s: float = _LOAD_TIMEOUT_S,
) -> tuple[ContractCheck, ...]:
    """Try out on a running server what publishing and rolling back rely on.

    Args:
        address: its gRPC ``HOST:PORT``.
        repository: a folder it reads models from, seen from here. Without one the files travel in
            the load call: everything is tried but the load of files that look unmodified.
        switches: how often the new version is taken up and let go of.
        rate_per_s: of requests meanwhile, Poisson.
        load_timeout_s: limit on one load.

    Returns:
        One check for each promise; a single INCONCLUSIVE one if the server cannot be tried.

    Raises:
        ServerError: nothing answers there, or it stopped answering.
    """
    with TritonClient(address) as client:
        client.metadata()
        was_ready = client.ready()
        scratch = ProbeModel(client, repository, load_timeout_s)
        try:
            scratch.issue(1)
            scratch.serve(1)
        except ServerError as error:
            scratch.remove()
            return (_cannot_be_tried(str(error)),)
        try:
            checks = _Trial(scratch, rate_per_s).run(switches)
        finally:
            scratch.remove()
        return (*checks, _left_as_it_was(client, was_ready=was_ready))


@dataclass(slots=True)
class _Trial:
    """One round through all promises.

    Attributes:
        untrue: where index, parameters or answers were not what had been asked for.
    """

    scratch: ProbeModel
    rate_per_s: float
    untrue: list[str] = field(default_factory=list)
    looks: int = 0

    def run(self, switches: int) -> tuple[ContractCheck, ...]:
        with self._called() as callers:
            found = [self._failed_load(), *self._switching(switches), self._reload()]
            time.sleep(_SETTLE_S)
        # A server that died in between kept nothing, but that is another matter than a promise.
        self.scratch.client.metadata()
        lost = self._lost(callers, 2 * switches)
        truth = _check(
            "the index, the configuration and unversioned answers tell what serves",
            not self.untrue,
            f"{self.looks} looks" if not self.untrue else "; ".join(self.untrue),
        )
        return (lost, *found, truth, self._control())

    def _failed_load(self) -> ContractCheck:
        """Version 2 is broken; the next load of it is not, which clears strict readiness."""
        before = self._load_of_one()
        self.scratch.files[2] = BROKEN
        said = ""
        try:
            self.scratch.serve(1, 2)
        except ServerError as error:
            said = str(error)
        finally:
            self.scratch.files[2] = SOURCE.read_bytes()
        self._look(serves=1, ready={1}, digest="first")
        stayed = _same(before, self._load_of_one())
        kept = bool(said) and stayed
        reason = "refused, and version 1 was not even reloaded"
        if not kept:
            reason = "version 1 was reloaded" if said else "Triton said that it had loaded"
        return _check("a load that fails leaves the old version serving", kept, reason)

    def _switching(self, switches: int) -> Iterator[ContractCheck]:
        """The policy goes [1] -> [1, 2] -> [1], as in a promotion and its rollback."""
        reloads, moved, back_s = 0, 0, []
        for number in range(2, switches + 2):
            alone = self._load_of_one()
            self.scratch.issue(number)
            self._told(1, 2)
            self._look(serves=2, ready={1, 2}, digest="first")
            before = self._load_of_one()
            moved += not _same(alone, before)
            back_s.append(self._told(1))
            self._look(serves=1, ready={1}, digest="first")
            reloads += not _same(before, self._load_of_one())
        yield _check(
            "a version published beside the live one leaves it in place",
            moved == 0,
            f"{moved} of {switches} reloaded version 1",
        )
        yield _check(
            "a rollback by the version policy alone does not reload",
            reloads == 0,
            f"{reloads} of {switches} reloaded; the slowest took {max(back_s) * 1e3:.0f} ms",
        )

    def _reload(self) -> ContractCheck:
        """The files are as they were; only the configuration in the call says something new."""
        before = self._load_of_one()
        self._told(1, digest="second", write=False)
        self._look(serves=1, ready={1}, digest="second")
        after = self._load_of_one()
        reloaded = isinstance(after, int) and after != before
        return _check(
            "a configuration in the load call reloads files that look unmodified"
            if self.scratch.repository is not None
            else "a configuration in the load call reloads",
            reloaded,
            "reloaded, and the new digest is in force" if reloaded else "nothing was reloaded",
        )

    def _lost(self, callers: Callers, switched: int) -> ContractCheck:
        """Failed and wrong answers over everything that was done to the server meanwhile."""
        sent, wrong = callers.sent, len(callers.wrong)
        reason = f"{callers.failed} failed and {wrong} wrong of {sent} requests"
        good = callers.failed == 0 and wrong == 0
        if good and sent:
            reason += (
                f" in {switched} switches (with 95 % confidence less than "
                f"{_RULE_OF_THREE / sent:.2g} of requests are lost)"
            )
        elif not good:
            reason += f": {callers.errors or callers.wrong[0]}"
        return _check("no request is lost while versions are switched", good, reason)

    def _control(self) -> ContractCheck:
        """What must lose requests: if it does not, the checks above could not see a loss."""
        with self._called() as callers:
            self.scratch.unload()
            time.sleep(_SETTLE_S)
            self._told(1, digest="second")
            self._load_of_one()
            time.sleep(_SETTLE_S)
        seen = callers.failed > 0
        return ContractCheck(
            promise="control: unload and load does lose requests, and is seen to",
            outcome=Outcome.PASSED if seen else Outcome.INCONCLUSIVE,
            reason=f"{callers.failed} of {callers.sent} requests failed",
        )

    @contextmanager
    def _called(self) -> Iterator[Callers]:
        samples = [{"x": np.full((1, 1), number, np.float32)} for number in range(_SAMPLES)]
        traffic = Traffic.of(self.scratch.name, samples)
        with Callers(
            self.scratch.client.address, traffic, self.rate_per_s, wrong_in=_wrong_in
        ) as callers:
            yield callers

    def _look(self, *, serves: int, ready: set[int], digest: str) -> None:
        """Compare what the server says, three ways, with what it was told."""
        self.looks += 1
        facts: tuple[tuple[str, Callable[[], object], object], ...] = (
            ("ready are", self.scratch.ready, ready),
            ("the configuration names", self.scratch.digest, digest),
            ("of releases it names", self.scratch.named, self.scratch.releases),
            ("unversioned requests went to", self._answering, {serves}),
        )
        for what, ask, wanted in facts:
            found = _answer(ask)
            if found != wanted:
                self.untrue.append(f"{what} {found}, not {wanted}")

    def _told(self, *versions: int, digest: str = "first", write: bool = True) -> float:
        """Seconds that the call took; a refusal is noted."""
        try:
            return self.scratch.serve(*versions, digest=digest, write=write)
        except ServerError as error:
            self.untrue.append(str(error))
            return 0.0

    def _load_of_one(self) -> object:
        return _answer(lambda: self.scratch.ask("1").load)

    def _answering(self) -> set[int]:
        said = [self.scratch.ask() for _ in range(_ASKS)]
        return {each.version for each in said} | {int(each.header) for each in said}


def _same(load: object, later: object) -> bool:
    """Whether a version told the same load twice; an error is no load."""
    return isinstance(load, int) and load == later


def _answer(ask: Callable[[], object]) -> object:
    """What the server says, or why it does not."""
    try:
        return ask()
    except ServerError as error:
        return str(error)


def _wrong_in(sample: int, reply: Reply) -> str:
    x, version, _ = reply.outputs["y"][0].tolist()
    if (x, str(int(version))) == (float(sample), reply.model_version):
        return ""
    return (
        f"sample {sample} was answered with {x:g} by version {int(version)}, under the name of "
        f"version {reply.model_version}"
    )


def _check(promise: str, kept: bool, reason: str) -> ContractCheck:  # noqa: FBT001
    outcome = Outcome.PASSED if kept else Outcome.FAILED
    return ContractCheck(promise=promise, outcome=outcome, reason=reason)


def _cannot_be_tried(error: str) -> ContractCheck:
    if _NOT_EXPLICIT in error:
        why = (
            "it takes no load calls: it polls its repository, or was started with "
            "--model-control-mode=none. Start it with --model-control-mode=explicit"
        )
    elif _NO_PYTHON in error:
        why = "it has no Python backend, which the scratch model needs"
    else:
        why = f"the scratch model did not load: {error}"
    promise = "a model of our own can be loaded"
    return ContractCheck(promise=promise, outcome=Outcome.INCONCLUSIVE, reason=why)


def _left_as_it_was(client: TritonClient, *, was_ready: bool) -> ContractCheck:
    """Under strict readiness a server is not ready before what was unloaded is gone."""
    deadline = time.monotonic() + _GONE_S
    while client.ready() != was_ready and time.monotonic() < deadline:
        time.sleep(_SETTLE_S)
    now, words = client.ready(), {True: "ready", False: "not ready"}
    return _check(
        "the server is as ready afterwards as before",
        now == was_ready,
        f"{words[was_ready]} before, {words[now]} afterwards",
    )
