"""Whether a server behaves as promotions rely on, tried on it with a model of this program's own.

Triton's documentation withdrew its promise of a reload without loss in January 2026, and versions
differ: so each promise is tried under load. No other model is touched.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from enginegate.contract.probe_model import BROKEN_SOURCE, WORKING_SOURCE, ProbeModel
from enginegate.errors import ServerError
from enginegate.evidence import Outcome
from enginegate.loadgen.background_load import BackgroundLoad
from enginegate.loadgen.traffic import Traffic
from enginegate.records import Record
from enginegate.triton.client import TritonClient
from enginegate.triton.types import Reply

_SAMPLES = 16
_UNVERSIONED_REQUESTS = 5
_RATE_PER_S = 50.0
_LOAD_TIMEOUT_S = 60.0
_SETTLE_S = 0.25
_READY_WITHIN_S = 10.0
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
    """Try on a running server everything that publishing and rolling back rely on.

    Args:
        address: its gRPC ``HOST:PORT``.
        repository: a folder it reads models from, seen from here. Without one the files travel in
            the load call: everything is tried but the load of files that look unmodified.
        switches: how often the new version is published and rolled back.
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
        model = ProbeModel(client, repository, load_timeout_s)
        try:
            model.add_release(1)
            model.serve(1)
        except ServerError as error:
            model.remove()
            return (_not_testable(str(error)),)
        try:
            checks = _Trial(model, rate_per_s).run(switches)
        finally:
            model.remove()
        return (*checks, _readiness_check(client, was_ready=was_ready))


@dataclass(slots=True)
class _Trial:
    """One round through all promises.

    Attributes:
        mismatches: where index, configuration or answers differed from what had been loaded.
        comparisons: how often they were compared.
    """

    model: ProbeModel
    rate_per_s: float
    mismatches: list[str] = field(default_factory=list)
    comparisons: int = 0

    def run(self, switches: int) -> tuple[ContractCheck, ...]:
        with self._background_load() as load:
            checks = [self._failed_load(), *self._switching(switches), self._reload()]
            time.sleep(_SETTLE_S)
        # A server that died in between is an error, not a broken promise.
        self.model.client.metadata()
        truth = _check(
            "the index, the configuration and unversioned answers tell what serves",
            not self.mismatches,
            "; ".join(self.mismatches) or f"{self.comparisons} comparisons",
        )
        return (_lost_requests(load, 2 * switches), *checks, truth, self._control())

    def _failed_load(self) -> ContractCheck:
        """Version 2 is broken; the next load of it is not, which clears strict readiness."""
        before = self._load_of_version_1()
        self.model.sources[2] = BROKEN_SOURCE
        refused = False
        try:
            self.model.serve(1, 2)
        except ServerError:
            refused = True
        finally:
            self.model.sources[2] = WORKING_SOURCE
        self._compare(serving=1, ready={1}, digest="first")
        stayed = _is_same_load(before, self._load_of_version_1())
        reason = "refused, and version 1 was not even reloaded"
        if not (refused and stayed):
            reason = "version 1 was reloaded" if refused else "Triton said that it had loaded"
        return _check(
            "a load that fails leaves the old version serving", refused and stayed, reason
        )

    def _switching(self, switches: int) -> Iterator[ContractCheck]:
        """The policy goes [1] -> [1, 2] -> [1], as in a promotion and its rollback."""
        reloaded_by_publish, reloaded_by_rollback, rollback_s = 0, 0, []
        for number in range(2, switches + 2):
            before = self._load_of_version_1()
            self.model.add_release(number)
            self._serve(1, 2)
            self._compare(serving=2, ready={1, 2}, digest="first")
            beside = self._load_of_version_1()
            reloaded_by_publish += not _is_same_load(before, beside)
            rollback_s.append(self._serve(1))
            self._compare(serving=1, ready={1}, digest="first")
            reloaded_by_rollback += not _is_same_load(beside, self._load_of_version_1())
        yield _check(
            "a version published beside the live one leaves it in place",
            reloaded_by_publish == 0,
            f"{reloaded_by_publish} of {switches} reloaded version 1",
        )
        yield _check(
            "a rollback by the version policy alone does not reload",
            reloaded_by_rollback == 0,
            f"{reloaded_by_rollback} of {switches} reloaded; "
            f"the slowest took {max(rollback_s) * 1e3:.0f} ms",
        )

    def _reload(self) -> ContractCheck:
        """The files stay as they were; only the configuration in the call changes."""
        before = self._load_of_version_1()
        self._serve(1, digest="second", write=False)
        self._compare(serving=1, ready={1}, digest="second")
        after = self._load_of_version_1()
        reloaded = isinstance(after, int) and after != before
        return _check(
            "a configuration in the load call reloads files that look unmodified"
            if self.model.repository is not None
            else "a configuration in the load call reloads",
            reloaded,
            "reloaded, and the new digest is in force" if reloaded else "nothing was reloaded",
        )

    def _control(self) -> ContractCheck:
        """A change that must lose requests: if it does not, the other checks see no loss either."""
        with self._background_load() as load:
            self.model.unload()
            time.sleep(_SETTLE_S)
            self._serve(1, digest="second")
            self._load_of_version_1()
            time.sleep(_SETTLE_S)
        report = load.report()
        return ContractCheck(
            promise="control: unload and load does lose requests, and is seen to",
            outcome=Outcome.PASSED if report.failed else Outcome.INCONCLUSIVE,
            reason=f"{report.failed} of {report.sent} requests failed",
        )

    def _background_load(self) -> BackgroundLoad:
        samples = [{"x": np.full((1, 1), number, np.float32)} for number in range(_SAMPLES)]
        return BackgroundLoad(
            self.model.client.address,
            Traffic.of(self.model.name, samples),
            rate_per_s=self.rate_per_s,
            wrong_in=_wrong_in,
        )

    def _compare(self, *, serving: int, ready: set[int], digest: str) -> None:
        """Compare four answers of the server with what was loaded."""
        self.comparisons += 1
        facts: tuple[tuple[str, Callable[[], object], object], ...] = (
            ("ready are", self.model.ready_versions, ready),
            ("the configuration names", self.model.digest_in_force, digest),
            ("of releases it names", self.model.labels_in_force, self.model.digests),
            ("unversioned requests went to", self._unversioned_answers, {serving}),
        )
        for subject, ask, expected in facts:
            answer = _answer_or_error(ask)
            if answer != expected:
                self.mismatches.append(f"{subject} {answer}, not {expected}")

    def _serve(self, *versions: int, digest: str = "first", write: bool = True) -> float:
        """Seconds that the call took; a refusal is a mismatch."""
        try:
            return self.model.serve(*versions, digest=digest, write=write)
        except ServerError as error:
            self.mismatches.append(str(error))
            return 0.0

    def _load_of_version_1(self) -> object:
        return _answer_or_error(lambda: self.model.infer("1").load)

    def _unversioned_answers(self) -> set[int]:
        answers = [self.model.infer() for _ in range(_UNVERSIONED_REQUESTS)]
        return {each.version for each in answers} | {int(each.triton_version) for each in answers}


def _lost_requests(load: BackgroundLoad, switches: int) -> ContractCheck:
    """Failed and wrong answers over everything that was done to the server meanwhile."""
    report, wrong = load.report(), len(load.wrong)
    reason = f"{report.failed} failed and {wrong} wrong of {report.sent} requests"
    lossless = report.failed == 0 and wrong == 0
    if lossless and report.sent:
        reason += (
            f" in {switches} switches (with 95 % confidence less than "
            f"{_RULE_OF_THREE / report.sent:.2g} of requests are lost)"
        )
    elif not lossless:
        reason += f": {report.errors or load.wrong[0]}"
    return _check("no request is lost while versions are switched", lossless, reason)


def _is_same_load(load: object, later: object) -> bool:
    """Whether a version answered with the same load number twice; an error is no number."""
    return isinstance(load, int) and load == later


def _answer_or_error(ask: Callable[[], object]) -> object:
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


def _not_testable(error: str) -> ContractCheck:
    if _NOT_EXPLICIT in error:
        why = (
            "it takes no load calls: it polls its repository, or was started with "
            "--model-control-mode=none. Start it with --model-control-mode=explicit"
        )
    elif _NO_PYTHON in error:
        why = "it has no Python backend, which the probe model needs"
    else:
        why = f"the probe model did not load: {error}"
    promise = "a model of our own can be loaded"
    return ContractCheck(promise=promise, outcome=Outcome.INCONCLUSIVE, reason=why)


def _readiness_check(client: TritonClient, *, was_ready: bool) -> ContractCheck:
    """Under strict readiness a server is not ready before an unloaded model is gone."""
    deadline = time.monotonic() + _READY_WITHIN_S
    while client.ready() != was_ready and time.monotonic() < deadline:
        time.sleep(_SETTLE_S)
    now, words = client.ready(), {True: "ready", False: "not ready"}
    return _check(
        "the server is as ready afterwards as before",
        now == was_ready,
        f"{words[was_ready]} before, {words[now]} afterwards",
    )
