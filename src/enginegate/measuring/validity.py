"""Whether a measurement says anything about the server: reasons why not, with what to do next.

A slow or failing server is no reason; a generator that could not keep up is.

Warm-up. From every run the same is left out: its first tenth, at most two seconds
(`measure.warmup_s`), and of that only what was answered. A start that is slow for longer is counted
in full where the model was warm already: it is the server's. Right after a load it may be the
model's first executions; then the run is invalid ("still warming up") and is measured again, now
warm, and counted in full.
"""

import numpy as np
from numpy.typing import NDArray

from enginegate.evidence import Outcome
from enginegate.loadgen.schedule import load_pattern
from enginegate.loadgen.traffic import LoadResult
from enginegate.measurement import P99, TIMERS_MS, ClosedLoad, Generator
from enginegate.measuring.p99 import FEWEST_SAMPLES, decide_fixed, nearest_rank
from enginegate.measuring.raw_requests import RawRequests
from enginegate.messages import per_second, short_number
from enginegate.triton.types import Statistics

# Sent at less of the asked rate than this, the server had an easier time than its number says.
MIN_ACHIEVED = 0.99
# How late the generator may be: a smaller share discards more runs, a larger moves the tail more.
_LATE_SHARE_OF_SLO = 0.25
# Above that, lateness moves every request's place against the limit.
_HEAVY_SHARE_OF_SLO = 0.5
# A run counts as slow with this confidence: lower than a gate's, so that doubt discards the run.
_SLOW_CONFIDENCE = 0.9
# By how much a whole run's rate may differ from its name: a tenth, or three standard deviations of
# a Poisson count where that is more.
_MOST_DRIFT, _CHANCE = 0.1, 3.0
# A run that lasted this share of its load is a whole one; the last gap may be long.
_WHOLE = 0.95
# A process this busy has no spare time; it harms once lateness is a visible share of the limit.
_BUSY_CORES, _VISIBLE_SHARE = 0.9, 0.2
# Answers that the server may not have counted yet when its counters were read.
_UNCOUNTED_SHARE, _UNCOUNTED = 0.02, 32

# Detection of a slow start: fewer, longer windows would miss a short one, more would be noise.
_WINDOWS, _FEWEST_WINDOWS, _FEWEST_REQUESTS = 20, 8, 10
# A window is warm within three deviations of the second half's medians, or a tenth where they agree
# more closely than that.
_DEVIATIONS, _SHARE = 3.0, 0.1
_NORMAL = 1.4826  # a normal distribution's standard deviation over its median absolute deviation


def allowed_lateness_ms(slo_p99_ms: float) -> float:
    """How late the generator may be, at the 99th percentile, before a measurement is invalid.

    A quarter of the SLO, and need not be below what a busy machine's timers do. A late request is
    charged to the server, so lateness never makes a run pass; `lateness_decides` sees to it that it
    makes no run fail, however short the SLO is.
    """
    return max(TIMERS_MS, _LATE_SHARE_OF_SLO * slo_p99_ms)


def share_of_rate_sent(result: LoadResult) -> float | None:
    """Rate sent over rate asked for; None: closed loop."""
    return None if isinstance(result.load, ClosedLoad) else result.achieved_share


def late_p99_ms(result: LoadResult) -> float:
    """99th percentile of how late the generator was; 0 in a closed loop, where nothing is due."""
    if isinstance(result.load, ClosedLoad) or not len(result.due_s):
        return 0.0
    return max(0.0, nearest_rank(result.late_s) * 1e3)


def reasons_invalid(
    result: LoadResult,
    requests: RawRequests,
    generator: Generator,
    counted: Statistics | None,
    *,
    throughput_per_s: float,
    slo_ms: float,
) -> tuple[str, ...]:
    """Why the numbers must not be used; empty if they may be.

    Args:
        result: what was sent.
        requests: of the result, with those of the warm-up marked.
        generator: who sent it, with what is known of its limits.
        counted: the server's counters after the run minus before; None when they are not known.
        throughput_per_s: good answers a second.
        slo_ms: the SLO's 99th percentile, which says how late the generator may be.
    """
    reasons = [
        *generator_reasons(
            result, requests, generator, throughput_per_s=throughput_per_s, slo_ms=slo_ms
        ),
        _drifted(result),
        _too_few(int((~requests.warm).sum())),
        _restarted(result, counted),
    ]
    return tuple(reason for reason in reasons if reason)


def generator_reasons(
    result: LoadResult,
    requests: RawRequests,
    generator: Generator,
    *,
    throughput_per_s: float,
    slo_ms: float,
) -> tuple[str, ...]:
    """Those reasons why the numbers are the generator's, not the server's; arguments as above."""
    late_limit_ms = allowed_lateness_ms(slo_ms)
    closed = isinstance(result.load, ClosedLoad)
    reasons = [
        _too_slow(result),
        _too_few_told(result),
        _too_late(result, late_limit_ms),
        "" if closed else lateness_decides(requests, slo_ms),
        _too_busy(result, generator, late_limit_ms),
        _beyond_trust(result, generator, throughput_per_s),
    ]
    return tuple(reason for reason in reasons if reason)


def lateness_decides(requests: RawRequests, slo_ms: float) -> str:
    """Whether a run fails counted from when requests were due only because they left late.

    The difference is the generator's, so such a run must not be called slow: where it meets the
    limit counted from when they left; or, where lateness is heavy against the SLO, already where it
    is not shown to fail counted so.

    Returns:
        Why the run must not be used; empty if it may be.
    """
    due_ms = requests.latencies_ms
    late_ms = ((requests.sent_s - requests.due_s) * 1e3)[~requests.warm]
    over = int((~(due_ms <= slo_ms)).sum())
    over_since_sent = int((~(due_ms - late_ms <= slo_ms)).sum())
    if not _slow(len(due_ms), over) or _slow(len(due_ms), over_since_sent):
        return ""
    heavy = nearest_rank(late_ms) > _HEAVY_SHARE_OF_SLO * slo_ms
    if not heavy and over_since_sent > (1.0 - P99) * len(due_ms):
        return ""
    return (
        f"{over} of {len(due_ms)} requests are over {slo_ms:g} ms counted from when they were due, "
        f"but {over_since_sent} counted from when they left, so the generator decides: lower the "
        "rate, or stop what else runs on this machine"
    )


def _slow(requests: int, over: int) -> bool:
    return decide_fixed(requests, over, confidence=_SLOW_CONFIDENCE).outcome is Outcome.FAILED


def _drifted(result: LoadResult) -> str:
    """Whether a whole run offered another mean rate than it is named by.

    A recording whose rate changes sends more or less than that in a part of it.
    """
    load = result.load
    if isinstance(load, ClosedLoad) or result.lasted_s < _WHOLE * load.duration_s:
        return ""
    if not load_pattern(load.arrivals).is_steady:
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
    achieved = share_of_rate_sent(result)
    if achieved is None or achieved >= MIN_ACHIEVED:
        return ""
    return (
        f"the generator sent at {achieved:.1%} of the asked rate (needs {MIN_ACHIEVED:.0%}): "
        "lower the rate, or give it more processor"
    )


def _too_few_told(result: LoadResult) -> str:
    told, due = len(result.due_s), len(result.due_s) + result.missing
    if told >= MIN_ACHIEVED * due:
        return ""
    return (
        f"{result.generator.driver} tells of {told} of the {due} requests that were due (needs "
        f"{MIN_ACHIEVED:.0%}): lower the rate, or use the driver python"
    )


def _too_late(result: LoadResult, limit_ms: float) -> str:
    late_ms = late_p99_ms(result)
    if late_ms <= limit_ms:
        return ""
    return (
        f"the generator was {short_number(late_ms, 2)} ms late at the 99th percentile (limit "
        f"{short_number(limit_ms, 2)} ms): lower the rate, or stop what else runs on this machine"
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
        f"{per_second(rate)} is more than the {per_second(trusted)} that this generator was shown "
        "to keep up with against a do-nothing model: let more processes send, or lower the rate"
    )


def _too_few(samples: int) -> str:
    if samples >= FEWEST_SAMPLES:
        return ""
    return (
        f"{samples} requests after the warm-up say nothing about a tail (needs {FEWEST_SAMPLES}): "
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


def still_warming_up(result: LoadResult, cut_s: float) -> tuple[str, ...]:
    """Why a run right after a load must not be used: it was slow for longer than what is cut."""
    until_s = slow_until_s(result.due_s, result.latency_s)
    if until_s <= cut_s:
        return ()
    reason = (
        f"still warming up: slower than the rest for {short_number(until_s, 2)} s after it was "
        f"loaded, of which {short_number(cut_s, 2)} s are cut: measure again, or longer"
    )
    return (reason,)


def slow_until_s(due_s: NDArray[np.float64], latency_s: NDArray[np.float64]) -> float:
    """Seconds from the start for which a run was slower than its rest; 0 when it was not.

    At most about half of the run; a start that is slow for longer has no rest to compare with.

    Welch's procedure (The Statistical Analysis of Simulation Results, 1983), where the eye is
    replaced by a rule: the run is cut into windows of equal count, and it is warm from the first
    window whose median is within the range of the second half. Medians, and the first such window,
    because a stall of the server is no warm-up; MSER-5 (White, Cobb and Spratt, 2000), which
    minimises the error of a mean, may take all that precedes one late stall for one. A start that
    is faster than the rest is no warm-up either: that is a queue filling up. Nor is one in which
    requests failed.

    Args:
        due_s: when each should have left, ascending, shape ``(R,)``.
        latency_s: infinite for a failure, shape ``(R,)``.
    """
    windows = min(_WINDOWS, len(latency_s) // _FEWEST_REQUESTS)
    if windows < _FEWEST_WINDOWS:
        return 0.0
    parts = np.array_split(latency_s, windows)
    warm = _first_warm(np.array([np.median(part) for part in parts]))
    if not all(np.isfinite(part).all() for part in parts[:warm]):
        return 0.0
    return float(np.array_split(due_s, windows)[warm][0]) if warm else 0.0


def _first_warm(medians: NDArray[np.float64]) -> int:
    """Index of the first window of the warm part, at most the middle one."""
    half = len(medians) // 2
    usual = float(np.median(medians[half:]))
    if not np.isfinite(usual):
        return 0
    spread = _NORMAL * float(np.median(np.abs(medians[half:] - usual)))
    settled = medians <= usual + max(_DEVIATIONS * spread, _SHARE * usual)
    return next((index for index in range(half) if settled[index]), half)
