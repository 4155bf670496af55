"""Whether a measurement says anything about the server: reasons why not, with what to do next.

A slow or failing server is no reason; a generator that could not keep up is.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from enginegate.evidence import Outcome
from enginegate.loadgen.traffic import LoadResult
from enginegate.measurement import ClosedLoad, Generator
from enginegate.measuring.p99 import P99, decide
from enginegate.measuring.raw_requests import Requests
from enginegate.measuring.warmup import slow_until_s
from enginegate.triton.types import Statistics
from enginegate.wording import per_second, short_number

MIN_SAMPLES = 20
TIMERS_MS = 5.0  # what a busy machine's timers and event loops do by themselves

_MIN_ACHIEVED = 0.99
_LATE_SHARE_OF_SLO = 0.25
_HEAVY_SHARE_OF_SLO = 0.5  # above that, lateness moves every request's place against the limit
_SLOW_CONFIDENCE = 0.9
_MOST_DRIFT, _CHANCE = 0.1, 3.0
_WHOLE = 0.95
_BUSY_CORES = 0.9
_VISIBLE_SHARE = 0.2
_UNCOUNTED_SHARE, _UNCOUNTED = 0.02, 32


def allowed_lateness_ms(slo_p99_ms: float) -> float:
    """How late the generator may be before a measurement is void.

    A quarter of the SLO, and need not be below what a busy machine's timers do. A late request is
    charged to the server, so lateness never makes a run pass; that it makes no run fail is
    `lateness_decides`' to see to, however short the SLO is.
    """
    return max(TIMERS_MS, _LATE_SHARE_OF_SLO * slo_p99_ms)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a measurement is held against.

    Attributes:
        slo_ms: the SLO's 99th percentile.
        late_ms: largest 99th percentile of how late the generator may be.
    """

    slo_ms: float
    late_ms: float

    @classmethod
    def of(cls, slo_p99_ms: float) -> Self:
        """Those of an SLO."""
        return cls(slo_p99_ms, allowed_lateness_ms(slo_p99_ms))


def achieved_share(result: LoadResult) -> float | None:
    """Rate sent over rate asked for; None: closed loop."""
    return None if isinstance(result.load, ClosedLoad) else result.achieved_share


def late_p99_ms(result: LoadResult) -> float:
    """99th percentile of how late the generator was; 0 in a closed loop, where nothing is due."""
    if isinstance(result.load, ClosedLoad) or not len(result.due_s):
        return 0.0
    return max(0.0, float(np.quantile(result.late_s, 0.99)) * 1e3)


def invalid(
    result: LoadResult,
    requests: Requests,
    generator: Generator,
    counted: Statistics | None,
    *,
    throughput_per_s: float,
    limits: Limits,
) -> tuple[str, ...]:
    """Why the numbers must not be used; empty if they may be.

    Args:
        result: what was sent.
        requests: the same, with what is warm-up.
        generator: who sent it, with what is known of its limits.
        counted: the server's counters after the run minus before; None when they are not known.
        throughput_per_s: good answers a second.
        limits: of lateness, and the SLO.
    """
    closed = isinstance(result.load, ClosedLoad)
    reasons = [
        _too_slow(result),
        _too_late(result, limits.late_ms),
        "" if closed else lateness_decides(requests, limits.slo_ms),
        _drifted(result),
        _too_busy(result, generator, limits.late_ms),
        _beyond_trust(result, generator, throughput_per_s),
        _too_few(int((~requests.warm).sum())),
        _restarted(result, counted),
    ]
    return tuple(reason for reason in reasons if reason)


def warming_up(result: LoadResult, cut_s: float) -> tuple[str, ...]:
    """Why a run right after a load must not be used: it was slow for longer than what is cut."""
    until_s = slow_until_s(result.due_s, result.latency_s)
    if until_s <= cut_s:
        return ()
    reason = (
        f"still warming up: slower than the rest for {short_number(until_s, 2)} s after it was "
        "loaded, of which "
        f"{short_number(cut_s, 2)} s are cut: measure again, or longer"
    )
    return (reason,)


def lateness_decides(requests: Requests, slo_ms: float) -> str:
    """Whether a run fails counted from when requests were due only because they left late.

    The difference is the generator's, so such a run must not be called slow: where it holds counted
    from when they left; or, where lateness is heavy against the SLO, already where it is not shown
    to fail counted so.

    Returns:
        Why the run must not be used; empty if it may be.
    """
    due_ms = requests.latencies_ms
    late_ms = ((requests.sent_s - requests.due_s) * 1e3)[~requests.warm]
    over = int((~(due_ms <= slo_ms)).sum())
    of_server = int((~(due_ms - late_ms <= slo_ms)).sum())
    if not _slow(len(due_ms), over):
        return ""
    heavy = float(np.quantile(late_ms, P99)) > _HEAVY_SHARE_OF_SLO * slo_ms
    fails_anyway = _slow(len(due_ms), of_server)
    holds = of_server <= (1.0 - P99) * len(due_ms)
    if fails_anyway or not (heavy or holds):
        return ""
    return (
        f"{over} of {len(due_ms)} requests are over {slo_ms:g} ms counted from when they were due, "
        f"but {of_server} counted from when they left, so the generator decides: lower the rate, "
        "or stop what else runs on this machine"
    )


def _slow(requests: int, over: int) -> bool:
    return decide(requests, over, confidence=_SLOW_CONFIDENCE).outcome is Outcome.FAILED


def _drifted(result: LoadResult) -> str:
    """Whether a whole run offered another mean rate than it is named by.

    A recording whose rate changes sends more or less than that in a part of it.
    """
    load = result.load
    if isinstance(load, ClosedLoad) or result.lasted_s < _WHOLE * load.duration_s:
        return ""
    if load.arrivals == "bursts":
        # Their mean is kept over whole seconds only.
        return ""
    sent, asked = len(result.due_s), load.rate_per_s * result.lasted_s
    if abs(sent - asked) <= max(_MOST_DRIFT * asked, _CHANCE * asked**0.5):
        return ""
    return (
        f"{sent} requests were due in {short_number(result.lasted_s)} s, not the {asked:.0f} that "
        f"{per_second(load.rate_per_s)} stands for: the arrivals are not steady, so raise [search] "
        "measurement_s, or choose other [load] arrivals"
    )


def _too_slow(result: LoadResult) -> str:
    achieved = achieved_share(result)
    if achieved is None or achieved >= _MIN_ACHIEVED:
        return ""
    return (
        f"the generator sent at {achieved:.1%} of the asked rate (needs {_MIN_ACHIEVED:.0%}): "
        "lower the rate, or give it more processor"
    )


def _too_late(result: LoadResult, limit_ms: float) -> str:
    late_ms = late_p99_ms(result)
    if late_ms <= limit_ms:
        return ""
    return (
        f"the generator was {short_number(late_ms, 2)} ms late at the 99th percentile (limit "
        f"{short_number(limit_ms, 2)} "
        "ms): lower the rate, or stop what else runs on this machine"
    )


def _too_busy(result: LoadResult, generator: Generator, limit_ms: float) -> str:
    """A full core alone is no harm: in an open loop the requests must also have been late."""
    harmed = isinstance(result.load, ClosedLoad) or late_p99_ms(result) > _VISIBLE_SHARE * limit_ms
    if generator.cpu_share < _BUSY_CORES or not harmed:
        return ""
    return (
        f"the generator's busiest process used {generator.cpu_share:.0%} of a core, so the numbers "
        "are its own as much as the server's: let more processes send, or send less"
    )


def _beyond_trust(result: LoadResult, generator: Generator, throughput_per_s: float) -> str:
    trusted = generator.trusted_per_s
    rate = result.load.offered_per_s or throughput_per_s
    if trusted is None or rate <= trusted:
        return ""
    return (
        f"{per_second(rate)} is more than the {per_second(trusted)} that this generator was "
        "shown to keep up "
        "with against a do-nothing model: let more processes send, or lower the rate"
    )


def _too_few(samples: int) -> str:
    if samples >= MIN_SAMPLES:
        return ""
    return (
        f"{samples} requests after the warm-up say nothing about a tail (needs {MIN_SAMPLES}): "
        "measure longer"
    )


def _restarted(result: LoadResult, counted: Statistics | None) -> str:
    """A restart or a reload sets the counters to zero, so they count less than was answered."""
    if counted is None:
        return ""
    answered = len(result.due_s) - result.failed
    if counted.requests < 0 or counted.executions < 0:
        return (
            "the server's counters went backwards, so it or the model was restarted meanwhile: "
            "measure again"
        )
    if counted.requests < (1.0 - _UNCOUNTED_SHARE) * answered - _UNCOUNTED:
        return (
            f"the server counted {counted.requests} of {answered} answers, so it or the model was "
            "restarted meanwhile: measure again"
        )
    return ""
