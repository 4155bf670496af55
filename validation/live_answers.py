"""What a sample of live requests says: agreement with FP32, in all and by slice, and input drift.

Samples follow one another, so both are judged over all of them together: agreement by
validation/anytime_tests.py, drift by spending less of the error on each further sample.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from enginegate.evidence import Finding, Outcome
from enginegate.policy.gates import Gates
from enginegate.policy.operating import Watch
from enginegate.watch.log import Count, WatchCheck
from validation.agreement import OutputComparison
from validation.anytime_tests import surely
from validation.drift import MIN_SAMPLES, USUAL_MAX_PSI, Drift
from validation.watch import alpha_of, live_finding, seen

_AGREEMENT = "agreement"
_SLICES = "slice_agreement"
_DRIFT = "input_drift"


def agreeing(compared: OutputComparison, gates: Gates) -> NDArray[np.bool_] | None:
    """Which answers agree with FP32's, shape ``(N,)``; None where the policy has no measure of it.

    Classes: the top class is the same. Else: the difference is within the first limit that the
    gates state, of absolute error, relative error or cosine.
    """
    if compared.task == "classification":
        return np.asarray(compared.top1_match)
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
) -> tuple[Count, ...]:
    """All rows, then each value of each slice column that has at most ``most`` values."""
    counts = [Count(what=_AGREEMENT, samples=len(agrees), bad=int((~agrees).sum()))]
    for column, values in sorted(slices.items()):
        names = np.unique(values)
        for name in names if len(names) <= most else ():
            rows = agrees[values == name]
            what = f"{_SLICES}/{column}={name}"
            counts.append(Count(what=what, samples=len(rows), bad=int((~rows).sum())))
    return tuple(counts)


def judge_agreement(
    counts: tuple[Count, ...], rules: Watch, past: Sequence[WatchCheck]
) -> tuple[Finding, ...]:
    """Whether answers agree with FP32's often enough, and whether those of some slice do not."""
    whole, *parts = counts
    limit, alpha = 1.0 - rules.min_agreement, alpha_of(rules) / 2.0
    agreed = 1.0 - whole.bad / max(whole.samples, 1)
    told = f"{whole.samples - whole.bad} of {whole.samples} answers agree with FP32's"
    if surely(seen(whole, past), "above", limit, alpha=alpha):
        outcome, word = Outcome.FAILED, "surely too few over the samples so far"
    elif agreed >= rules.min_agreement and whole.samples >= MIN_SAMPLES:
        outcome, word = Outcome.PASSED, f">= {rules.min_agreement:g}"
    else:
        outcome, word = Outcome.INCONCLUSIVE, f"too few to tell whether >= {rules.min_agreement:g}"
    found = [
        live_finding(
            _AGREEMENT,
            outcome,
            f"{told}, {agreed:.4g}: {word}",
            value=agreed,
            limit=rules.min_agreement,
            relation=">=",
            unit="fraction",
            samples=whole.samples,
            advisory=outcome is Outcome.INCONCLUSIVE,
        )
    ]
    bad = [
        part for part in parts if surely(seen(part, past), "above", limit, alpha=alpha / len(parts))
    ]
    return (*found, *([_of_slices(bad, parts, rules)] if parts else ()))


def _of_slices(bad: list[Count], parts: list[Count], rules: Watch) -> Finding:
    worst = min(bad or parts, key=lambda part: 1.0 - part.bad / max(part.samples, 1))
    agreed = 1.0 - worst.bad / max(worst.samples, 1)
    name = worst.what.partition("/")[2]
    said = f"{len(bad)} of {len(parts)} slices agree surely too rarely" if bad else "no slice"
    reason = said if bad else f"{said} of {len(parts)} surely agrees too rarely"
    return live_finding(
        _SLICES,
        Outcome.FAILED if bad else Outcome.PASSED,
        f"{reason}; lowest {name}: {agreed:.4g} of {worst.samples} (limit {rules.min_agreement:g})",
        value=agreed,
        limit=rules.min_agreement,
        relation=">=",
        unit="fraction",
        samples=worst.samples,
    )


def judge_live_drift(
    drifts: tuple[Drift, ...], rows: tuple[int, int], rules: Watch, past: Sequence[WatchCheck]
) -> Finding:
    """Whether live inputs are still what scales were calibrated on; fails only at a stated limit.

    The k-th sample is tested at ``alpha / (k (k + 1))``, which sums to ``alpha`` over all of them.

    Args:
        drifts: from `measure_drift`; the p values are corrected within the sample.
        rows: of calibration, and of the sample.
        rules: ``max_drift`` is the limit.
        past: looks before this one; each with a sample was a test.
    """
    tests = 1 + sum(look.sample is not None for look in past)
    alpha = (1.0 - rules.confidence) / (tests * (tests + 1))
    limit = USUAL_MAX_PSI if rules.max_drift is None else rules.max_drift
    drifted = [d for d in drifts if d.p_value <= alpha and not d.psi <= limit]
    shown = (drifted or list(drifts))[:1]
    enough = bool(shown) and min(rows) >= MIN_SAMPLES
    outcome = Outcome.PASSED if enough else Outcome.INCONCLUSIVE
    if enough and drifted:
        outcome = Outcome.INCONCLUSIVE if rules.max_drift is None else Outcome.FAILED
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
        advisory=rules.max_drift is None or not enough,
        remedy="Look at what changed upstream; if it is meant to stay, calibrate on recorded "
        "traffic and qualify again."
        if drifted
        else "",
    )
