"""The analysis of a canary: the first server of a fleet, before the others are changed.

With a judge (validation/live.py) the canary has to pass the checks by which every live release is
watched. A library caller without one gets less: the share of requests that failed. In both cases
the canary must prove at the end once more what it serves.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import TypeAlias

from enginegate.decision import Release
from enginegate.errors import RepositoryError, ServerError
from enginegate.evidence import Finding, Outcome
from enginegate.policy.operating import Watch
from enginegate.repository.promotion import LiveRepository
from enginegate.repository.store.golden import Golden
from enginegate.repository.store.layout import Layout
from enginegate.triton.endpoint import LiveAddresses
from enginegate.triton.types import Statistics
from enginegate.watch.log import ShareCount, WatchCheck, WatchLog
from enginegate.watch.probe import LiveProber, LiveReading, take_reading
from enginegate.workspace import Workspace, now

Judge: TypeAlias = Callable[
    [LiveReading, Release, Watch, Sequence[WatchCheck]],
    tuple[tuple[Finding, ...], tuple[ShareCount, ...]],
]

_POLL_S = 1.0
_ENDS = frozenset({Outcome.FAILED, Outcome.ERRORED})
_log = logging.getLogger("enginegate.repository")


@dataclass(frozen=True, slots=True)
class CanaryAnalysis:
    """How a canary is checked.

    Attributes:
        judge: one check's numbers, what was promised, the policy's limits and the checks before it
            -> findings, and what they add to later checks.
        server: where the canary listens; None: nobody knows.
        workspace: where the checks are kept, so that the watch goes on from them.
    """

    judge: Judge
    server: LiveAddresses | None
    workspace: Workspace

    def check(
        self, layout: Layout, release: Release, rules: Watch, check_cancelled: Callable[[], None]
    ) -> WatchCheck:
        """Measure for ``rules.look_s``, judge it and keep it; a check that broke is errored.

        What ``check_cancelled`` raises meanwhile ends the check, which then counts for nothing.
        """
        log, ended, held = WatchLog.at(self.workspace, release), Event(), layout.held_to(release)
        past, number = log.read(), log.next_number()
        past = tuple(p for p in past if p.promised_by(release) == held.scorecard_sha256)
        prober = LiveProber(
            samples=Golden.read(layout.golden_file(release.version)).samples,
            slo_s=held.promise.slo_p99_ms / 1e3,
            seed=number,
            ended=ended.is_set,
        )
        reading: LiveReading | None = None
        counts: tuple[ShareCount, ...] = ()
        try:
            reading = _beside(partial(self._read, release, rules, prober), check_cancelled, ended)
            findings, counts = self.judge(reading, held, rules, past)
        except ServerError as error:
            outcome, reason = Outcome.ERRORED, str(error)
            findings = (Finding(gate="measured", scope="live", outcome=outcome, reason=reason),)
        check = WatchCheck(
            model=layout.model,
            version=release.version,
            release_sha256=release.digest,
            number=number,
            at=now(),
            intensive=True,
            reading=reading,
            findings=findings,
            counts=counts,
            scorecard=held.scorecard_sha256,
        )
        if check.outcome in _ENDS:
            check = check.model_copy(update={"action": "rollback"})
        return log.add(check)

    def _read(self, release: Release, rules: Watch, prober: LiveProber) -> LiveReading:
        if self.server is None:
            raise ServerError("no live server is known")
        return take_reading(
            self.server, release.model, release.version, duration_s=rules.look_s, prober=prober
        )


@dataclass(frozen=True, slots=True)
class Canary:
    """The first server of a fleet, and what it has to pass before the others are changed.

    Attributes:
        rules: the limits.
        analysis: None: only failed requests are counted.
    """

    primary: LiveRepository
    model: str
    rules: Watch
    sleep: Callable[[float], None] = time.sleep
    analysis: CanaryAnalysis | None = None

    def analyse(self, seconds: float, check_cancelled: Callable[[], None]) -> None:
        """Analyse it for so long, then prove once more what it serves.

        Args:
            seconds: how long.
            check_cancelled: raises if somebody asked to cancel it; asked about once a second.

        Raises:
            RepositoryError: it fell short, could not be measured, serves something else by now, or
                what ``check_cancelled`` raised.
            ServerError: it does not answer.
        """
        if self.analysis is None:
            self._count(seconds, check_cancelled)
        else:
            self._check(self.analysis, seconds, check_cancelled)
        if not self.primary.serves(self.model):
            raise RepositoryError("it does not serve the new release any more")

    def _check(
        self, analysis: CanaryAnalysis, seconds: float, check_cancelled: Callable[[], None]
    ) -> None:
        """Check after check, each as long as the watch's or longer, unless there is less time."""
        layout = Layout(self.primary.root, self.model)
        current = layout.current()
        if current is None:
            raise RepositoryError("nothing is live on it any more")
        release = layout.release(current.version)
        checks = int(seconds // self.rules.look_s) or int(seconds > 0.0)
        for _ in range(checks):
            rules = self.rules.model_copy(update={"look_s": seconds / checks})
            check = analysis.check(layout, release, rules, check_cancelled)
            if check.outcome in _ENDS:
                raise RepositoryError(str(check))
            check_cancelled()
            if check.outcome is Outcome.INCONCLUSIVE:
                _log.warning("the canary is undecided: %s", check)

    def _count(self, seconds: float, check_cancelled: Callable[[], None]) -> None:
        before, deadline = self._counters(), time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.sleep(min(_POLL_S, left))
            check_cancelled()
            counters = self._counters()
            failed = counters.failures - before.failures
            answered = failed + counters.requests - before.requests
            # One failure of three is no share yet; as many as the fewest that decide allow is.
            if failed > self.rules.max_error_share * max(answered, self.rules.min_requests):
                raise RepositoryError(
                    f"{failed} of {answered} requests failed on it; watch.max_error_share allows "
                    f"{self.rules.max_error_share:.2%}"
                )

    def _counters(self) -> Statistics:
        if self.primary.client is None:
            raise RepositoryError("no live Triton answers")
        return self.primary.client.statistics(self.model)


def _beside(
    read: Callable[[], LiveReading], check_cancelled: Callable[[], None], ended: Event
) -> LiveReading:
    """Read in another thread: whoever asks to cancel must not wait for its end.

    Checking may take its time (storage far away), which requests that are timed must not.
    """
    with ThreadPoolExecutor(max_workers=1) as reader:
        taken = reader.submit(read)
        try:
            while not wait([taken], timeout=_POLL_S).done:
                check_cancelled()
        finally:
            ended.set()
        return taken.result()
