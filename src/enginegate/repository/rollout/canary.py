"""The window in which the first server of a fleet is watched, before the others are told.

With a judge (validation/live.py) it is held to the looks that the watch holds every live release
to. A library caller without one gets less: the share of requests that failed. In both cases it must
prove at the end once more what it serves.
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
from enginegate.watch.log import Count, WatchCheck, WatchLog
from enginegate.watch.probe import LiveProber, LiveReading, take_reading
from enginegate.workspace import Workspace, now

Judge: TypeAlias = Callable[
    [LiveReading, Release, Watch, Sequence[WatchCheck]],
    tuple[tuple[Finding, ...], tuple[Count, ...]],
]

_ASK_S = 1.0
_ENDS = frozenset({Outcome.FAILED, Outcome.ERRORED})
_log = logging.getLogger("enginegate.repository")


@dataclass(frozen=True, slots=True)
class CanaryAnalysis:
    """How a canary is looked at.

    Attributes:
        judge: one look's numbers, what was promised, the policy's limits and the looks before it
            -> findings, and what they add to later looks.
        server: where the canary listens; None: nobody knows.
        workspace: where the looks are kept, so that the watch goes on from them.
    """

    judge: Judge
    server: LiveAddresses | None
    workspace: Workspace

    def look(
        self, layout: Layout, release: Release, rules: Watch, goes_on: Callable[[], None]
    ) -> WatchCheck:
        """Take one look of ``rules.look_s``, judge it and keep it; what broke is errored.

        What ``goes_on`` raises meanwhile ends the look, which then counts for nothing.
        """
        looks, ended, held = WatchLog.at(self.workspace, release), Event(), layout.held_to(release)
        past, number = looks.read(), looks.next_number()
        past = tuple(p for p in past if p.promised_by(release) == held.scorecard_sha256)
        prober = LiveProber(
            samples=Golden.read(layout.golden_file(release.version)).samples,
            slo_s=held.promise.slo_p99_ms / 1e3,
            seed=number,
            ended=ended.is_set,
        )
        reading: LiveReading | None = None
        counts: tuple[Count, ...] = ()
        try:
            reading = _beside(partial(self._read, release, rules, prober), goes_on, ended)
            findings, counts = self.judge(reading, held, rules, past)
        except ServerError as error:
            findings = (_not_measured(str(error)),)
        look = WatchCheck(
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
        if look.outcome in _ENDS:
            look = look.model_copy(update={"action": "rollback"})
        return looks.add(look)

    def _read(self, release: Release, rules: Watch, prober: LiveProber) -> LiveReading:
        if self.server is None:
            raise ServerError("no live server is known")
        return take_reading(
            self.server, release.model, release.version, look_s=rules.look_s, prober=prober
        )


@dataclass(frozen=True, slots=True)
class Canary:
    """Watches the first server of a fleet before the others are told.

    Attributes:
        rules: what it is held to.
        goes_on: raises if somebody asked to end it.
        looking: None: only failed requests are counted.
    """

    lead: LiveRepository
    model: str
    rules: Watch
    sleep: Callable[[float], None] = time.sleep
    goes_on: Callable[[], None] = lambda: None
    looking: CanaryAnalysis | None = None

    def hold(self, seconds: float) -> None:
        """Watch it for so long, then prove once more what it serves.

        Raises:
            RepositoryError: it fell short, could not be measured, or serves something else by now.
            ServerError: it does not answer.
        """
        if self.looking is None:
            self._count(seconds)
        else:
            self._look(self.looking, seconds)
        if not self.lead.serves(self.model):
            raise RepositoryError("it does not serve the new release any more")

    def _look(self, looking: CanaryAnalysis, seconds: float) -> None:
        """Look after look, each as long as the watch's or longer, unless the window is shorter."""
        layout = Layout(self.lead.root, self.model)
        current = layout.current()
        if current is None:
            raise RepositoryError("nothing is live on it any more")
        release = layout.release(current.version)
        looks = int(seconds // self.rules.look_s) or int(seconds > 0.0)
        for _ in range(looks):
            rules = self.rules.model_copy(update={"look_s": seconds / looks})
            look = looking.look(layout, release, rules, self.goes_on)
            if look.outcome in _ENDS:
                raise RepositoryError(str(look))
            self.goes_on()
            if look.outcome is Outcome.INCONCLUSIVE:
                _log.warning("the canary is undecided: %s", look)

    def _count(self, seconds: float) -> None:
        before, deadline = self._counters(), time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.sleep(min(_ASK_S, left))
            self.goes_on()
            self._judge(before)

    def _judge(self, before: Statistics) -> None:
        found = self._counters()
        failed = found.failures - before.failures
        asked = failed + found.requests - before.requests
        # One failure of three is no share yet; as many as the fewest that decide would allow is.
        if failed <= self.rules.max_error_share * max(asked, self.rules.min_requests):
            return
        raise RepositoryError(
            f"{failed} of {asked} requests failed on it; watch.max_error_share allows "
            f"{self.rules.max_error_share:.2%}"
        )

    def _counters(self) -> Statistics:
        if self.lead.client is None:
            raise RepositoryError("no live Triton answers")
        return self.lead.client.statistics(self.model)


def _beside(
    read: Callable[[], LiveReading], goes_on: Callable[[], None], ended: Event
) -> LiveReading:
    """Read in another thread: whoever asks for the end must not wait for it.

    Asking may take its time (storage far away), which requests that are timed must not.
    """
    with ThreadPoolExecutor(max_workers=1) as reader:
        taken = reader.submit(read)
        try:
            while not wait([taken], timeout=_ASK_S).done:
                goes_on()
        finally:
            ended.set()
        return taken.result()


def _not_measured(why: str) -> Finding:
    return Finding(gate="measured", scope="live", outcome=Outcome.ERRORED, reason=why)
