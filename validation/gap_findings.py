"""Findings about the evidence itself: what was not judged, and why; nothing is left unsaid."""

from collections.abc import Mapping

import numpy as np

from enginegate.evidence import Finding, Outcome
from enginegate.policy.gates import Gates
from validation.agreement import OutputComparison
from validation.checks import MAXIMA, RULES, GateCheck, slice_sizes, unlimited
from validation.gate import finding_of
from validation.output_spec import OutputSpec
from validation.reading import CheckReading, counts_of, finite
from validation.statistics import NO_ESTIMATE

_NAMED_SLICES = 8
_OPEN_LIMIT = {"<=": float("inf"), ">=": float("-inf")}


def notes_on(comparison: OutputComparison, gates: Gates, asked: OutputSpec) -> tuple[Finding, ...]:
    """Every note on one comparison."""
    scope, sizes = comparison.scope, slice_sizes(comparison, asked.max_values)
    found = [judge_slice_sizes(scope, sizes, gates), _constant_reference(comparison, gates)]
    found += [
        _too_many_values(comparison, column, gates, most=asked.max_values)
        for column in comparison.slices
    ]
    if scope.partition(":")[0] == "evaluation":
        if comparison.top1_reference is not None and comparison.correct_reference is None:
            found.append(unlabelled(scope, gates))
        found += [
            _unscored(name, asked, scope, gates)
            for name in asked.metrics
            if name not in comparison.scores
        ]
    if len(comparison):
        found += [_measured(gate, comparison, gates) for gate in unlimited(comparison, gates)]
    return tuple(note for note in found if note is not None)


def judge_slice_sizes(
    scope: str, sizes: Mapping[tuple[str, str], int], gates: Gates
) -> Finding | None:
    """Name the slices that are too small to judge; None without slices.

    Advisory: a note on what was not judged, so that nothing is dropped in silence.
    """
    if not sizes:
        return None
    need = gates.min_slice_samples
    small = [f"{column}={value} ({n})" for (column, value), n in sizes.items() if n < need]
    more = f" and {len(small) - _NAMED_SLICES} more" if len(small) > _NAMED_SLICES else ""
    reason = f"all {len(sizes)} slices have >= {need} samples"
    if small:
        named = ", ".join(small[:_NAMED_SLICES])
        reason = f"{len(small)} of {len(sizes)} slices have < {need} samples, so were not judged: "
        reason += named + more
    return Finding(
        gate="slice_samples",
        scope=scope,
        outcome=Outcome.INCONCLUSIVE if small else Outcome.PASSED,
        reason=reason,
        value=min(sizes.values()),
        limit=need,
        relation=">=",
        unit="samples",
        samples=sum(n for n in sizes.values() if n < need),
        advisory=True,
        remedy="Add samples of these slices, or merge them into larger ones." if small else "",
    )


def unlabelled(scope: str, gates: Gates) -> Finding:
    """Accuracy cannot be judged without labels: inconclusive, never passed."""
    return finding_of(
        GateCheck.of("accuracy_loss", scope, gates),
        Outcome.INCONCLUSIVE,
        f"the {scope} data has no labels, so accuracy was not measured",
        NO_ESTIMATE,
        remedy="Add an array named label to the data: one integer class a sample.",
    )


def _unscored(name: str, asked: OutputSpec, scope: str, gates: Gates) -> Finding:
    metric = asked.metrics[name]
    output = metric.output or asked.output or "OUTPUT"
    return finding_of(
        GateCheck.of_metric(name, metric.kind, scope, gates),
        Outcome.INCONCLUSIVE,
        f"the {scope} data has no labels for it, so {name} was not measured",
        NO_ESTIMATE,
        remedy=f"Add an array named label.{output} to the data: what the output should be.",
    )


def _too_many_values(
    comparison: OutputComparison, column: str, gates: Gates, *, most: int
) -> Finding | None:
    """A column such as a user's name cuts the data into crumbs: it is not judged."""
    values = len(np.unique(comparison.slices[column]))
    if values <= most:
        return None
    return Finding(
        gate="slice_values",
        scope=comparison.scope,
        outcome=Outcome.INCONCLUSIVE,
        reason=f"slice column {column} has {values} values > {most}, so it was not judged",
        value=values,
        limit=most,
        relation="<=",
        unit="values",
        samples=len(comparison),
        advisory="slice_values" in gates.advisory,
        remedy="Group its values, take the column out of the data, or raise slices.max_values.",
    )


def _constant_reference(comparison: OutputComparison, gates: Gates) -> Finding | None:
    """FP32 that answers the same to everything shows nothing about a candidate."""
    power = comparison.power
    if power is None or len(power) < 2 or np.ptp(power.real) > 0.0:  # noqa: PLR2004 - one sample cannot vary
        return None
    return Finding(
        gate="constant_reference",
        scope=comparison.scope,
        outcome=Outcome.INCONCLUSIVE,
        reason=f"FP32's output has the same size on all {len(power)} samples",
        samples=len(power),
        advisory="constant_reference" in gates.advisory,
        remedy="Look at the inputs: preprocessing, or one sample repeated. Give data that varies.",
    )


def _measured(gate: str, comparison: OutputComparison, gates: Gates) -> Finding:
    """A number that the policy sets no limit for: shown, and never decides."""
    rule = RULES[gate]
    check = GateCheck(
        gate, comparison.scope, _OPEN_LIMIT[rule.relation], gates.confidence, advisory=True
    )
    values = comparison.columns()[rule.column]
    if gate in MAXIMA:
        value = float(values.max())
        ends = (value, value)
        low, high = None, None
    else:
        estimate = CheckReading.of(check, counts_of(check, values)).estimate
        value, ends = estimate.value, (estimate.high, estimate.low)
        low, high = finite(estimate.low), finite(estimate.high)
    return Finding(
        gate=gate,
        scope=comparison.scope,
        outcome=Outcome.INCONCLUSIVE,
        reason=f"{rule.noun} {value:.4g}; the policy sets no limit; {len(comparison)} samples",
        value=finite(value),
        relation=rule.relation,
        unit=rule.unit,
        low=low,
        high=high,
        samples=len(comparison),
        advisory=True,
        remedy="Shown only. Limit it under [gates] in the policy, and it decides.",
        would_pass=finite(ends[0] if rule.relation == "<=" else ends[1]),
    )
