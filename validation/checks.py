"""What is asked of a candidate: the gates' rules, bound to samples and to the policy's limits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

from enginegate.evidence import measure_words
from enginegate.policy.gates import ERRORS, Gates, Metric
from validation.agreement import OutputComparison
from validation.metrics.boxes import labelled_classes
from validation.metrics.class_counts import classes_of
from validation.outputs import CLASSIFY, OutputSpec
from validation.score import paired_form


@dataclass(frozen=True, slots=True)
class Rule:
    """What a gate measures, in which column of a comparison, and which way it is limited."""

    noun: str
    relation: Literal["<=", ">="]
    unit: str
    column: str
    remedy: str


_PRECISION = (
    "Calibrate on data that looks like this, keep sensitive layers at a higher precision, or leave "
    "this candidate out."
)
_FINITE = "Keep the layers that overflow at FP32 (FP16 ends at 65504), or use bf16."
_SAMPLES = "Add samples, or lower min_samples in the policy."

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "samples": Rule("sample count", ">=", "samples", "", _SAMPLES),
        "nonfinite": Rule("samples with NaN or Inf", "<=", "samples", "nonfinite", _FINITE),
        "accuracy_loss": Rule("accuracy loss", "<=", "fraction", "accuracy_delta", _PRECISION),
        "top1_agreement": Rule("top-1 agreement", ">=", "fraction", "top1_match", _PRECISION),
        "decision_agreement": Rule(
            "agreement of decisions", ">=", "fraction", "decision_agreement", _PRECISION
        ),
        "kl_p99": Rule("99th percentile of KL", "<=", "nats", "kl_nats", _PRECISION),
        "max_abs_error": Rule("largest absolute error", "<=", "", "max_abs_error", _PRECISION),
        "max_rel_error": Rule("largest relative error", "<=", "ratio", "rel_error", _PRECISION),
        "p99_abs_error": Rule(
            "99th percentile of absolute error", "<=", "", "max_abs_error", _PRECISION
        ),
        "p99_rel_error": Rule(
            "99th percentile of relative error", "<=", "ratio", "rel_error", _PRECISION
        ),
        "sqnr": Rule("signal to noise ratio", ">=", "dB", "power", _PRECISION),
        "cosine_p1": Rule("1st percentile of cosine", ">=", "cosine", "cosine", _PRECISION),
        "slice_accuracy_loss": Rule(
            "accuracy loss", "<=", "fraction", "accuracy_delta", _PRECISION
        ),
        "slice_top1_agreement": Rule("top-1 agreement", ">=", "fraction", "top1_match", _PRECISION),
    }
)
_LIMITS: Mapping[str, Callable[[Gates], float | None]] = MappingProxyType(
    {
        "samples": lambda g: g.min_samples,
        "nonfinite": lambda _: 0.0,
        "accuracy_loss": lambda g: g.max_accuracy_loss,
        "top1_agreement": lambda g: g.min_top1_agreement,
        "decision_agreement": lambda g: g.min_decision_agreement,
        "kl_p99": lambda g: g.max_kl_p99_nats,
        "max_abs_error": lambda g: g.max_abs_error,
        "max_rel_error": lambda g: g.max_rel_error,
        "p99_abs_error": lambda g: g.max_p99_abs_error,
        "p99_rel_error": lambda g: g.max_p99_rel_error,
        "sqnr": lambda g: g.min_sqnr_db,
        "cosine_p1": lambda g: g.min_cosine_p1,
        "slice_accuracy_loss": lambda g: g.max_slice_accuracy_loss,
        # Accuracy can be lost only where the top class changed, so a slice that agrees on all but
        # the margin has lost no more than the margin: the slice rule for samples without labels.
        "slice_top1_agreement": lambda g: (
            None
            if g.min_top1_agreement is None or g.max_slice_accuracy_loss is None
            else min(g.min_top1_agreement, 1.0 - g.max_slice_accuracy_loss)
        ),
    }
)
MAXIMA = frozenset({"max_abs_error", "max_rel_error"})
_WHOLE = tuple(name for name in RULES if not name.startswith("slice_"))


@dataclass(frozen=True, slots=True)
class GateCheck:
    """One gate on one set of samples, with its limit from the policy.

    Attributes:
        scope: e.g. evaluation, or evaluation/digit=8 for a slice.
        part: column and value of the slice; None for all samples.
        kind: of a metric's gate (its name ends in ``_loss``), the metric's kind; else empty.
        unit: of a metric in numbers, as the policy has it.
        only: the class that a slice is made of, where it is one of labels, pixels or boxes.
    """

    gate: str
    scope: str
    limit: float
    confidence: float
    advisory: bool
    part: tuple[str, str] | None = None
    kind: str = ""
    unit: str = ""
    only: int | None = None

    @classmethod
    def of(
        cls, gate: str, scope: str, gates: Gates, *, part: tuple[str, str] | None = None
    ) -> "GateCheck":
        """The check of a gate that the policy limits."""
        limit = _LIMITS[gate](gates)
        if limit is None:
            raise ValueError(f"the policy sets no limit for {gate}")
        return cls(gate, _scope(scope, part), limit, gates.confidence, gate in gates.advisory, part)

    @classmethod
    def of_metric(
        cls,
        name: str,
        metric: Metric,
        scope: str,
        gates: Gates,
        *,
        part: tuple[str, str] | None = None,
        only: int | None = None,
    ) -> "GateCheck":
        """The check that a metric loses no more than its margin, on all samples or on a slice."""
        gate = f"{'slice_' if part else ''}{name}_loss"
        margins = gates.max_slice_metric_loss if part else gates.max_metric_loss
        place = _scope(scope, part)
        advisory = gate in gates.advisory
        limit, confidence = margins[name], gates.confidence
        return cls(
            gate, place, limit, confidence, advisory, part, metric.kind, metric.unit, only=only
        )

    @property
    def rule(self) -> Rule:
        """What is measured, and in which direction it is limited."""
        if not self.kind:
            return RULES[self.gate]
        name = self.gate.removeprefix("slice_").removesuffix("_loss")
        unit = self.unit if paired_form(self.kind) == "numbers" else "fraction"
        noun = f"{measure_words(name)} {'growth' if self.kind in ERRORS else 'loss'}"
        return Rule(noun, "<=", unit, f"score.{name}", _PRECISION)

    def __str__(self) -> str:
        rule = self.rule
        return f"{self.gate} on {self.scope}: {rule.noun} {rule.relation} {self.limit:g}"

    @property
    def in_family(self) -> bool:
        """Whether this is one slice of many, to be judged together with the others."""
        return self.part is not None

    def allows(self, value: float) -> bool:
        """Whether a value is within the limit; NaN never is."""
        return value <= self.limit if self.rule.relation == "<=" else value >= self.limit

    def harm(self, value: float) -> float:
        """How far a value is beyond the limit, in limits where that has a meaning."""
        beyond = value - self.limit if self.rule.relation == "<=" else self.limit - value
        return beyond / self.limit if self.kind and self.limit else beyond


def checks_for(
    comparison: OutputComparison, gates: Gates, asked: OutputSpec = CLASSIFY
) -> tuple[GateCheck, ...]:
    """Every check of one comparison: on all its samples, then on each slice that is large enough.

    With labels slices are judged by accuracy and by metrics, without by agreement.
    """
    scope, present = comparison.scope, comparison.columns()
    whole = [
        GateCheck.of(name, scope, gates)
        for name in _WHOLE
        if _LIMITS[name](gates) is not None and (name == "samples" or RULES[name].column in present)
    ]
    whole += [
        GateCheck.of_metric(name, metric, scope, gates)
        for name, metric in asked.metrics.items()
        if name in comparison.scores
    ]
    classes = [
        GateCheck.of_metric(name, asked.metrics[name], scope, gates, part=part, only=int(part[1]))
        for name in gates.max_slice_metric_loss
        for part, size in class_sizes(comparison, name, asked).items()
        if size >= gates.min_slice_samples
    ]
    slices = [
        check
        for part, size in slice_sizes(comparison, asked.max_values).items()
        if size >= gates.min_slice_samples
        for check in _slice_checks(comparison, gates, asked, part)
    ]
    return (*whole, *classes, *slices)


def unlimited(comparison: OutputComparison, gates: Gates) -> tuple[str, ...]:
    """Gates that could be measured, and that the policy sets no limit for."""
    present = comparison.columns()
    return tuple(
        name for name in _WHOLE if RULES[name].column in present and _LIMITS[name](gates) is None
    )


def slice_sizes(comparison: OutputComparison, max_values: int = 200) -> dict[tuple[str, str], int]:
    """Samples in each slice, by column and value; columns with too many values have none."""
    sizes: dict[tuple[str, str], int] = {}
    for column, values in comparison.slices.items():
        found, counts = np.unique(values, return_counts=True)
        if len(found) <= max_values:
            sizes |= {(column, str(v)): int(n) for v, n in zip(found, counts, strict=True)}
    return sizes


def class_sizes(
    comparison: OutputComparison, metric: str, asked: OutputSpec
) -> dict[tuple[str, str], int]:
    """Samples that hold each class of labels, pixels or boxes, by slice; none for other metrics."""
    column = comparison.scores.get(metric)
    if column is None or not len(column) or column.ndim == 1:
        return {}
    form = paired_form(asked.metrics[metric].kind)
    sizes = classes_of(column) if form == "counts" else labelled_classes(column)
    # Data may have a slice column of that name, which is cut by samples.
    name = "class" if "class" not in comparison.slices else "labelled class"
    return {(name, str(each)): size for each, size in sizes.items()}


def judged_sizes(
    comparison: OutputComparison, gates: Gates, asked: OutputSpec
) -> dict[tuple[str, str], int]:
    """Samples of each slice, those that are classes of labels, pixels or boxes among them."""
    sizes = slice_sizes(comparison, asked.max_values)
    for name in gates.max_slice_metric_loss:
        sizes |= class_sizes(comparison, name, asked)
    return sizes


def _slice_checks(
    comparison: OutputComparison, gates: Gates, asked: OutputSpec, part: tuple[str, str]
) -> list[GateCheck]:
    scope, labelled = comparison.scope, comparison.accuracy_delta is not None
    name = "slice_accuracy_loss" if labelled else "slice_top1_agreement"
    found = []
    if comparison.top1_reference is not None and _LIMITS[name](gates) is not None:
        found.append(GateCheck.of(name, scope, gates, part=part))
    found += [
        GateCheck.of_metric(metric, asked.metrics[metric], scope, gates, part=part)
        for metric in gates.max_slice_metric_loss
        if metric in comparison.scores
    ]
    return found


def _scope(scope: str, part: tuple[str, str] | None) -> str:
    return scope if part is None else f"{scope}/{part[0]}={part[1]}"
