"""What is asked of a candidate: the gates' rules, bound to samples and to the policy's limits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

from enginegate.policy import Gates
from validation.agreement import Comparison


@dataclass(frozen=True, slots=True)
class Rule:
    """What a gate measures, and which number of the policy limits it."""

    noun: str
    relation: Literal["<=", ">="]
    limit: Callable[[Gates], float]
    unit: str
    remedy: str


_PRECISION = (
    "Calibrate on data that looks like this, keep sensitive layers at a higher precision, or leave "
    "this candidate out."
)
_FINITE = "Keep the layers that overflow at FP32 (FP16 ends at 65504), or use bf16."
_SAMPLES = "Add samples, or lower min_samples in the policy."

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "samples": Rule("sample count", ">=", lambda g: g.min_samples, "samples", _SAMPLES),
        "nonfinite": Rule("samples with NaN or Inf", "<=", lambda _: 0.0, "samples", _FINITE),
        "accuracy_loss": Rule(
            "accuracy loss", "<=", lambda g: g.max_accuracy_loss, "fraction", _PRECISION
        ),
        "top1_agreement": Rule(
            "top-1 agreement", ">=", lambda g: g.min_top1_agreement, "fraction", _PRECISION
        ),
        "kl_p99": Rule(
            "99th percentile of KL", "<=", lambda g: g.max_kl_p99_nats, "nats", _PRECISION
        ),
        "max_abs_error": Rule(
            "largest absolute error", "<=", lambda g: g.max_abs_error, "", _PRECISION
        ),
        "slice_accuracy_loss": Rule(
            "accuracy loss", "<=", lambda g: g.max_slice_accuracy_loss, "fraction", _PRECISION
        ),
        # Accuracy can be lost only where the top class changed, so a slice that agrees on all but
        # the margin has lost no more than the margin: the slice rule for samples without labels.
        "slice_top1_agreement": Rule(
            "top-1 agreement",
            ">=",
            lambda g: min(g.min_top1_agreement, 1.0 - g.max_slice_accuracy_loss),
            "fraction",
            _PRECISION,
        ),
    }
)
FAMILIES = ("slice_accuracy_loss", "slice_top1_agreement")


@dataclass(frozen=True, slots=True)
class Check:
    """One gate on one set of samples, with its limit from the policy.

    Attributes:
        scope: e.g. evaluation, or evaluation/digit=8 for a slice.
        part: column and value of the slice; None for all samples.
    """

    gate: str
    scope: str
    limit: float
    confidence: float
    advisory: bool
    part: tuple[str, str] | None = None

    @classmethod
    def of(
        cls, gate: str, scope: str, gates: Gates, *, part: tuple[str, str] | None = None
    ) -> "Check":
        """The check that the policy asks for."""
        return cls(
            gate=gate,
            scope=scope if part is None else f"{scope}/{part[0]}={part[1]}",
            limit=RULES[gate].limit(gates),
            confidence=gates.confidence,
            advisory=gate in gates.advisory,
            part=part,
        )

    @property
    def rule(self) -> Rule:
        """What is measured, and in which direction it is limited."""
        return RULES[self.gate]

    def __str__(self) -> str:
        rule = self.rule
        return f"{self.gate} on {self.scope}: {rule.noun} {rule.relation} {self.limit:g}"

    @property
    def in_family(self) -> bool:
        """Whether this is one slice of many, to be judged together with the others."""
        return self.gate in FAMILIES

    def allows(self, value: float) -> bool:
        """Whether a value is within the limit; NaN never is."""
        return value <= self.limit if self.rule.relation == "<=" else value >= self.limit

    def harm(self, value: float) -> float:
        """How far a value is beyond the limit; negative within."""
        return value - self.limit if self.rule.relation == "<=" else self.limit - value


def checks_for(comparison: Comparison, gates: Gates) -> tuple[Check, ...]:
    """Every check of one comparison: on all its samples, then on each slice that is large enough.

    With labels slices are judged by accuracy, without by agreement.
    """
    labelled = comparison.accuracy_delta is not None
    names = ["samples", "nonfinite", *(["accuracy_loss"] if labelled else [])]
    names += ["top1_agreement", "kl_p99", "max_abs_error"]
    whole = [Check.of(name, comparison.scope, gates) for name in names]
    family = "slice_accuracy_loss" if labelled else "slice_top1_agreement"
    slices = [
        Check.of(family, comparison.scope, gates, part=part)
        for part, size in slice_sizes(comparison).items()
        if size >= gates.min_slice_samples
    ]
    return (*whole, *slices)


def slice_sizes(comparison: Comparison) -> dict[tuple[str, str], int]:
    """Samples in each slice, by column and value."""
    sizes = {}
    for column, values in comparison.slices.items():
        for value, count in zip(*np.unique(values, return_counts=True), strict=True):
            sizes[column, str(value)] = int(count)
    return sizes
