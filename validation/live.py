"""Whether a live release does what was promised: one check's numbers + policy -> findings.

Shares (errors, slow answers, answers unlike FP32) are judged over all checks together, by a rule
that holds however often one checks (`validation.statistics`); once a check failed, counting starts
anew, so that a fault that is over does not fail the checks after it. Input drift is judged by
spending less of the error on each further sample. Gauges (mean server
time, queue, memory) are judged check by check: the policy says by how much they may exceed. Nothing
was promised above the promised load: what is found there is said, and counts for no later check.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginegate.decision import Promise, Release
from enginegate.evidence import Finding, Outcome
from enginegate.measurement import P99
from enginegate.messages import per_second, short_number
from enginegate.policy.gates import Gates
from enginegate.policy.operating import Watch
from enginegate.watch.log import ShareCount, WatchAction, WatchCheck
from enginegate.watch.probe import LiveReading
from validation.agreement import OutputComparison
from validation.drift import MIN_SAMPLES, USUAL_MAX_PSI, Drift
from validation.statistics import Seen, surely

# Errors, latency and agreement share the chance of a false alarm.
_TESTS = 3
# What a rollback would not cure, or what one reading of a gauge cannot show.
_ALERT_ONLY = frozenset({"input_drift", "pending", "gpu_memory"})
# What load alone can cause.
_OF_LOAD = frozenset({"error_share", "latency", "server_time"})


def alpha_of(limits: Watch) -> float:
    """Chance that one of the three shares ever fails a release that is within all limits."""
    return (1.0 - limits.confidence) / _TESTS


def judge_reading(
    reading: LiveReading,
    release: Release,
    limits: Watch,
    past: Sequence[WatchCheck],
    *,
    server: str = "",
) -> tuple[tuple[Finding, ...], tuple[ShareCount, ...]]:
    """What one check at one server says about a release, and what it adds to the shares.

    Args:
        reading: of the live version.
        release: what was promised.
        limits: the policy's limits.
        past: the checks before this one, oldest first.
        server: one of a fleet; empty: the first, or only one.
    """
    probe, of = reading.probe, f"/{server}" if server else ""
    errors = ShareCount(
        what=f"error_share{of}", samples=reading.answered + reading.failed, bad=reading.failed
    )
    slow = ShareCount(what=f"latency{of}", samples=probe.sent, bad=probe.over)
    findings = (
        *_wrong_version(probe.versions, release.version),
        *_unread(reading),
        _errors(reading, errors, limits, past),
        _latency(reading, slow, release.promise, limits, past),
        _server_time(reading, release.promise, limits),
        _queue(reading, limits),
        _gpu_memory(reading, limits),
    )
    placed = tuple(found.model_copy(update={"scope": f"live{of}"}) for found in findings)
    return placed, (errors, slow) if _promised(reading, release.promise) else ()


def not_measured(why: str, *, server: str = "") -> Finding:
    """A check that could not find out: errored, never fine."""
    found = live_finding(
        "measured",
        Outcome.ERRORED,
        why,
        remedy="Bring the live server up (`enginegate verify POLICY --repair`), and check again.",
    )
    return found.model_copy(update={"scope": f"live/{server}" if server else "live"})


def action_for(
    check: WatchCheck, limits: Watch, promise: Promise, *, can_go_back: bool
) -> WatchAction:
    """What the policy does about a check.

    Only a measured failure of the release itself rolls it back: what could not be measured, what
    more load than was promised can cause, and what another release would suffer from as well, is
    for a person to check at.

    Args:
        check: as it was judged.
        limits: the policy's.
        promise: of the release that was checked.
        can_go_back: whether there is an earlier release, and this one was never rolled back by a
            watch.
    """
    failed = [f for f in check.problems if f.outcome is Outcome.FAILED]
    its_own = [f for f in failed if f.gate not in _ALERT_ONLY | _excused(check, promise, f.scope)]
    if its_own and limits.on_failure == "rollback" and can_go_back:
        return "rollback"
    if any(f.outcome is Outcome.ERRORED for f in check.problems):
        return "alert"
    return "alert" if failed and limits.on_failure != "nothing" else "none"


def seen(count: ShareCount, past: Sequence[WatchCheck]) -> list[Seen]:
    """A share's counts, check by check, since the last check that failed on it.

    Each keeps its check's number, so that forgetting the oldest checks makes the others no younger.
    """
    checks, since = list(past), 0
    for place in range(len(checks) - 1, -1, -1):
        counted = any(c.what == count.what for c in checks[place].counts)
        if counted and _failed_on(count.what, checks[place]):
            since, checks = checks[place].number, checks[place + 1 :]
            break
    found = [
        Seen(check.number - since, c.samples, c.bad)
        for check in checks
        for c in check.counts
        if c.what == count.what
    ]
    number = past[-1].number + 1 if past else 1
    return [*found, Seen(number - since, count.samples, count.bad)]


def _failed_on(what: str, check: WatchCheck) -> bool:
    """Whether the finding about a share failed: its server's own, or the one about all slices."""
    gate, _, part = what.partition("/")
    found = {f.scope: f.outcome for f in check.findings if f.gate == gate}
    return found.get(f"live/{part}", found.get("live")) is Outcome.FAILED


def live_finding(gate: str, outcome: Outcome, reason: str, **fields: Any) -> Finding:
    """A finding about what is live."""
    return Finding(gate=gate, scope="live", outcome=outcome, reason=reason, **fields)


def _promised(reading: LiveReading, promise: Promise) -> bool:
    """Whether no more came than was promised to be borne."""
    return reading.arrived_per_s <= promise.throughput_per_s


def _excused(check: WatchCheck, promise: Promise, scope: str) -> frozenset[str]:
    """Gates that a server's load may have failed by itself."""
    server = scope.partition("/")[2]
    reading = check.others.get(server) if server else check.reading
    above = reading is not None and not _promised(reading, promise)
    return _OF_LOAD if above else frozenset()


def _unread(reading: LiveReading) -> tuple[Finding, ...]:
    """A metrics address that is known and does not answer: nobody sees the queue any more."""
    if not reading.unread:
        return ()
    why = f"the metrics could not be read: {reading.unread}"
    remedy = "Bring the metrics endpoint up, or correct its address under [target]."
    return (live_finding("metrics", Outcome.ERRORED, why, remedy=remedy),)


def _wrong_version(versions: tuple[str, ...], version: int) -> tuple[Finding, ...]:
    others = sorted(set(versions) - {str(version)})
    if not others:
        return ()
    return (
        live_finding(
            "served_version",
            Outcome.ERRORED,
            f"requests were answered by version {', '.join(others)}, not {version}",
            remedy="Run `enginegate verify POLICY`: the server serves what is not live.",
        ),
    )


def _errors(
    reading: LiveReading, count: ShareCount, limits: Watch, past: Sequence[WatchCheck]
) -> Finding:
    share, limit = count.bad / max(count.samples, 1), limits.max_error_share
    told = f"{count.bad} of {count.samples} requests failed, {share:.3g}"
    if surely(seen(count, past), "above", limit, alpha=alpha_of(limits)):
        outcome, reason = Outcome.FAILED, f"{told}; surely > {limit:g} over the checks so far"
    elif reading.live < limits.min_requests:
        outcome, reason = Outcome.INCONCLUSIVE, f"{told}; {_too_few(reading, limits)}"
    elif share <= limit:
        outcome, reason = Outcome.PASSED, f"{told} <= {limit:g}"
    else:
        outcome, reason = Outcome.INCONCLUSIVE, f"{told} > {limit:g}, which may be chance"
    return live_finding(
        "error_share",
        outcome,
        reason,
        value=share,
        limit=limit,
        relation="<=",
        unit="fraction",
        samples=count.samples,
        remedy="" if outcome is Outcome.PASSED else "The server's log says what failed.",
    )


def _latency(
    reading: LiveReading,
    count: ShareCount,
    promise: Promise,
    limits: Watch,
    past: Sequence[WatchCheck],
) -> Finding:
    """At the client, against the SLO; undecided for long, and only shown until then."""
    counts, limit, probe = seen(count, past), 1.0 - P99, reading.probe
    sent, over = sum(s.samples for s in counts), sum(s.having for s in counts)
    if surely(counts, "above", limit, alpha=alpha_of(limits)):
        outcome, word = Outcome.FAILED, "surely too many"
    elif surely(counts, "below", limit, alpha=alpha_of(limits)):
        outcome, word = Outcome.PASSED, "the SLO is met"
    else:
        outcome, word = Outcome.INCONCLUSIVE, "not decided yet"
    slowest = (
        "none was answered" if probe.slowest_ms is None else f"{short_number(probe.slowest_ms)} ms"
    )
    return live_finding(
        "latency",
        outcome,
        f"{over} of {sent} requests of ours took more than {promise.slo_p99_ms:g} ms ({word}); "
        f"{probe.sent} in this check, slowest: {slowest}",
        value=probe.slowest_ms,
        limit=promise.slo_p99_ms,
        relation="<=",
        unit="ms",
        samples=sent,
        advisory=outcome is Outcome.INCONCLUSIVE,
    )


def _server_time(reading: LiveReading, promise: Promise, limits: Watch) -> Finding:
    """Triton's counters give means only, so the mean is compared with the promised mean."""
    promised = promise.p99_ms if promise.server_ms is None else promise.server_ms
    limit, found = promised * limits.p99_over_promise, reading.server_ms
    offered = f"at {per_second(reading.arrived_per_s)}"
    outcome, advisory = Outcome.INCONCLUSIVE, False
    if reading.live < limits.min_requests or found is None:
        reason = _too_few(reading, limits)
    elif not _promised(reading, promise):
        reason = f"{short_number(found)} ms {offered}; nothing was promised above "
        reason += f"{per_second(promise.throughput_per_s)}"
    elif not found <= limit:
        outcome, reason = (
            Outcome.FAILED,
            f"mean {short_number(found)} ms > {short_number(limit)} ms {offered}",
        )
    elif promise.server_ms is None:
        reason, advisory = f"mean {short_number(found)} ms {offered}; only a p99 was promised", True
    else:
        outcome, reason = (
            Outcome.PASSED,
            f"mean {short_number(found)} ms <= {short_number(limit)} ms {offered}",
        )
    return live_finding(
        "server_time",
        outcome,
        reason,
        value=found,
        limit=limit,
        relation="<=",
        unit="ms",
        samples=reading.answered,
        advisory=advisory,
    )


def _queue(reading: LiveReading, limits: Watch) -> Finding:
    if reading.pending is None or reading.pending_before is None:
        waited = (
            ""
            if reading.queue_ms is None
            else f"; requests waited {short_number(reading.queue_ms)} ms"
        )
        return _unknown("pending", f"the metrics address is not known{waited}")
    holds = reading.pending <= limits.max_pending
    return live_finding(
        "pending",
        Outcome.PASSED if holds else Outcome.FAILED,
        f"{reading.pending} requests waiting {'<=' if holds else '>'} {limits.max_pending} "
        f"({reading.pending_before} before); {per_second(reading.arrived_per_s)} came, "
        f"{per_second(reading.answered / reading.lasted_s)} were answered",
        value=reading.pending,
        limit=limits.max_pending,
        relation="<=",
        unit="requests",
        samples=reading.answered,
    )


def _gpu_memory(reading: LiveReading, limits: Watch) -> Finding:
    share, limit = reading.gpu_memory_share, limits.max_gpu_memory_share
    if share is None:
        return _unknown("gpu_memory", "the server reports no GPU")
    holds = share <= limit
    return live_finding(
        "gpu_memory",
        Outcome.PASSED if holds else Outcome.FAILED,
        f"{share:.3g} of the fullest GPU {'<=' if holds else '>'} {limit:g}",
        value=share,
        limit=limit,
        relation="<=",
        unit="fraction",
    )


def _unknown(gate: str, why: str) -> Finding:
    return live_finding(
        gate,
        Outcome.INCONCLUSIVE,
        why,
        advisory=True,
        remedy="Name the server's metrics: under [target], or in its entry of target.fleet.",
    )


def _too_few(reading: LiveReading, limits: Watch) -> str:
    return f"{reading.live} live requests in this check, {limits.min_requests} are needed"


_AGREEMENT = "agreement"
_SLICES = "slice_agreement"
_DRIFT = "input_drift"


def agreeing(compared: OutputComparison, gates: Gates) -> NDArray[np.bool_] | None:
    """Which answers agree with FP32's, shape ``(N,)``; None where the policy has no measure of it.

    Classes: the top class is the same. Labels, pixels and boxes: of a sample's as many agree as the
    gates want of all together. Else: the difference is within the first limit that the
    gates state, of absolute error, relative error or cosine.
    """
    if compared.task == "classification":
        return np.asarray(compared.top1_match)
    if gates.min_decision_agreement is not None and compared.decision_agreement is not None:
        return np.asarray(compared.decision_agreement >= gates.min_decision_agreement)
    if gates.max_abs_error is not None:
        return np.asarray(compared.max_abs_error <= gates.max_abs_error)
    for limit in (gates.max_rel_error, gates.max_p99_rel_error):
        if limit is not None and compared.rel_error is not None:
            return np.asarray(compared.rel_error <= limit)
    if gates.min_cosine_p1 is not None and compared.cosine is not None:
        return np.asarray(compared.cosine >= gates.min_cosine_p1)
    return None


def count_agreement(
    agrees: NDArray[np.bool_], slices: dict[str, NDArray[np.str_]], most: int
) -> tuple[ShareCount, ...]:
    """All rows, then each value of each slice column that has at most ``most`` values."""
    counts = [ShareCount(what=_AGREEMENT, samples=len(agrees), bad=int((~agrees).sum()))]
    for column, values in sorted(slices.items()):
        names = np.unique(values)
        for name in names if len(names) <= most else ():
            rows = agrees[values == name]
            what = f"{_SLICES}/{column}={name}"
            counts.append(ShareCount(what=what, samples=len(rows), bad=int((~rows).sum())))
    return tuple(counts)


def judge_agreement(
    counts: tuple[ShareCount, ...], limits: Watch, past: Sequence[WatchCheck]
) -> tuple[Finding, ...]:
    """Whether answers agree with FP32's often enough, and whether those of some slice do not."""
    whole, *parts = counts
    limit, alpha = 1.0 - limits.min_agreement, alpha_of(limits) / 2.0
    agreed = 1.0 - whole.bad / max(whole.samples, 1)
    told = f"{whole.samples - whole.bad} of {whole.samples} answers agree with FP32's"
    if surely(seen(whole, past), "above", limit, alpha=alpha):
        outcome, word = Outcome.FAILED, "surely too few over the samples so far"
    elif agreed >= limits.min_agreement and whole.samples >= MIN_SAMPLES:
        outcome, word = Outcome.PASSED, f">= {limits.min_agreement:g}"
    else:
        outcome, word = Outcome.INCONCLUSIVE, f"too few to tell whether >= {limits.min_agreement:g}"
    found = [
        live_finding(
            _AGREEMENT,
            outcome,
            f"{told}, {agreed:.4g}: {word}",
            value=agreed,
            limit=limits.min_agreement,
            relation=">=",
            unit="fraction",
            samples=whole.samples,
            advisory=outcome is Outcome.INCONCLUSIVE,
        )
    ]
    bad = [
        part for part in parts if surely(seen(part, past), "above", limit, alpha=alpha / len(parts))
    ]
    return (*found, *([_of_slices(bad, parts, limits)] if parts else ()))


def _of_slices(bad: list[ShareCount], parts: list[ShareCount], limits: Watch) -> Finding:
    worst = min(bad or parts, key=lambda part: 1.0 - part.bad / max(part.samples, 1))
    agreed = 1.0 - worst.bad / max(worst.samples, 1)
    name = worst.what.partition("/")[2]
    said = f"{len(bad)} of {len(parts)} slices agree surely too rarely" if bad else "no slice"
    reason = said if bad else f"{said} of {len(parts)} surely agrees too rarely"
    return live_finding(
        _SLICES,
        Outcome.FAILED if bad else Outcome.PASSED,
        f"{reason}; lowest {name}: {agreed:.4g} of {worst.samples} "
        f"(limit {limits.min_agreement:g})",
        value=agreed,
        limit=limits.min_agreement,
        relation=">=",
        unit="fraction",
        samples=worst.samples,
    )


def judge_live_drift(
    drifts: tuple[Drift, ...], rows: tuple[int, int], limits: Watch, past: Sequence[WatchCheck]
) -> Finding:
    """Whether live inputs are still what scales were calibrated on; fails only at a stated limit.

    The k-th sample is tested at ``alpha / (k (k + 1))``, which sums to ``alpha`` over all of them.

    Args:
        drifts: from `measure_drift`; the p values are corrected within the sample.
        rows: of calibration, and of the sample.
        limits: ``max_drift`` is the limit.
        past: checks before this one; each with a sample was a test.
    """
    tests = 1 + sum(check.sample is not None for check in past)
    alpha = (1.0 - limits.confidence) / (tests * (tests + 1))
    limit = USUAL_MAX_PSI if limits.max_drift is None else limits.max_drift
    drifted = [d for d in drifts if d.p_value <= alpha and not d.psi <= limit]
    shown = (drifted or list(drifts))[:1]
    enough = bool(shown) and min(rows) >= MIN_SAMPLES
    outcome = Outcome.PASSED if enough else Outcome.INCONCLUSIVE
    if enough and drifted:
        outcome = Outcome.INCONCLUSIVE if limits.max_drift is None else Outcome.FAILED
    largest = f"{shown[0].input} {shown[0].statistic} {shown[0].psi:.3g}" if shown else "none"
    return live_finding(
        _DRIFT,
        outcome,
        f"{len(drifted)} of {len(drifts)} numbers surely have PSI > {limit:g}; largest: {largest}; "
        f"{rows[1]} recorded against {rows[0]} calibration samples",
        value=shown[0].psi if shown else None,
        limit=limit,
        relation="<=",
        unit="PSI",
        samples=rows[1],
        advisory=limits.max_drift is None or not enough,
        remedy="Check at what changed upstream; if it is meant to stay, calibrate on recorded "
        "traffic and qualify again."
        if drifted
        else "",
    )
