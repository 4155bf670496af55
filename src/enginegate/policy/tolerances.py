"""Standard tolerances: limits for a model that nobody has measured yet, by precision.

A policy takes them because its file says ``tolerances = "standard"`` under ``[gates.default]``; it
may state some limits itself. Where each number comes from: docs/gates.md.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from enginegate.candidate import Precision
from enginegate.policy.gates import (
    CLASSIFICATION_LIMITS,
    DECIDING_TASKS,
    DISTANCE_LIMITS,
    ERRORS,
    METRIC_TASKS,
    OutputTask,
)

# About the evidence, for every precision. 95 % is one-sided 2.5 %, as ICH E9 prefers; 400 samples
# are a few more than the 368 that bound a 99th percentile; a slice of 73 can settle a loss of 5 %.
EVIDENCE: Mapping[str, float] = MappingProxyType(
    {"confidence": 0.95, "min_samples": 400, "min_slice_samples": 75}
)


# What a task without [metrics] is scored by. Classes have their accuracy; which embeddings belong
# together only labels say, which not all data has.
STANDARD_METRICS: Mapping[OutputTask, str] = MappingProxyType(
    {"multi-label": "label_f1", "regression": "r2", "segmentation": "miou", "detection": "map"}
)
# Their scale is the labels', or unknown, so no margin is usual for them; nor for a user's own.
_NO_STANDARD = ERRORS | {"cosine"}
NO_METRICS: Mapping[str, Any] = MappingProxyType({})
_NOT_OF_NAMES = re.compile(r"[^a-z0-9_]")


def _standard(  # noqa: PLR0913 - a row of the table in docs/gates.md
    *,
    loss: float,
    slice_loss: float,
    agreement: float,
    decisions: float,
    kl: float,
    sqnr: float,
    cosine: float,
) -> Mapping[str, float]:
    return MappingProxyType(
        {
            "max_accuracy_loss": loss,
            "max_slice_accuracy_loss": slice_loss,
            "min_top1_agreement": agreement,
            "min_decision_agreement": decisions,
            "max_kl_p99_nats": kl,
            "min_sqnr_db": sqnr,
            "min_cosine_p1": cosine,
        }
    )


_FULL = _standard(
    loss=0.005, slice_loss=0.05, agreement=0.99, decisions=0.99, kl=1e-5, sqnr=100.0, cosine=0.99999
)
_TEN_BITS = _standard(
    loss=0.005, slice_loss=0.05, agreement=0.99, decisions=0.98, kl=1e-3, sqnr=50.0, cosine=0.9999
)
_SEVEN_BITS = _standard(
    loss=0.005, slice_loss=0.05, agreement=0.98, decisions=0.95, kl=2e-2, sqnr=32.0, cosine=0.999
)
_INT8 = _standard(
    loss=0.01, slice_loss=0.08, agreement=0.97, decisions=0.9, kl=1e-1, sqnr=20.0, cosine=0.98
)
_FP8 = _standard(
    loss=0.01, slice_loss=0.08, agreement=0.97, decisions=0.9, kl=1e-1, sqnr=15.0, cosine=0.97
)
STANDARD: Mapping[Precision, Mapping[str, float]] = MappingProxyType(
    {
        Precision.FP32: _FULL,
        Precision.TF32: _TEN_BITS,
        Precision.FP16: _TEN_BITS,
        Precision.BF16: _SEVEN_BITS,
        Precision.INT8: _INT8,
        Precision.FP8: _FP8,
    }
)
# Why each is what it is, in a sentence; docs/gates.md derives them.
REASONS: Mapping[str, str] = MappingProxyType(
    {
        "max_accuracy_loss": "MLPerf Inference asks quantised models for 99 % of FP32; half of "
        "that for wider types, where a loss means a fault",
        "max_slice_accuracy_loss": "73 samples can settle 5 %, 45 can settle 8 %",
        "min_top1_agreement": "what changes class may be right before or after, so it may fall "
        "further than accuracy",
        "min_decision_agreement": "a label, pixel or box near its threshold turns more easily than "
        "a top class",
        "max_metric_loss": "the accuracy's margin, for scores from 0 to 1",
        "max_slice_metric_loss": "the accuracy's margin in slices",
        "max_kl_p99_nats": "half the variance of the logits' errors, with 20 dB for a hundred "
        "layers",
        "min_sqnr_db": "noise of rounding once, with 20 dB for a hundred layers",
        "min_cosine_p1": "noise of that power turns a vector so far; 6 dB more for the worst 1 %",
        "confidence": "of every interval: one-sided 2.5 %, as ICH E9 prefers",
        "min_samples": "368 are the least that bound a 99th percentile",
        "min_slice_samples": "73 samples can settle a loss of 5 %; smaller slices are named and "
        "not judged",
    }
)


def complete_metrics(raw: Mapping[str, Any]) -> Any:
    """A policy's [metrics]; without any, where it asks for the standard, one that fits each output.

    Args:
        raw: a policy as TOML gives it.
    """
    stated, outputs = raw.get("metrics", {}), raw.get("outputs", {})
    gates = raw.get("gates")
    default = gates.get("default") if isinstance(gates, Mapping) else None
    standard = isinstance(default, Mapping) and default.get("tolerances") == "standard"
    if stated or not standard or not isinstance(outputs, Mapping):
        return stated
    several = raw.get("task") == "multi-output"
    tasks = {
        name: str(output.get("task")) if isinstance(output, Mapping) else ""
        for name, output in outputs.items()
    }
    if not several:
        tasks = {"": str(raw.get("task"))}
    found: dict[str, Any] = {}
    for output, task in tasks.items():
        kind = STANDARD_METRICS.get(task)  # type: ignore[call-overload]
        if kind is not None:
            name = f"{kind}_{_NOT_OF_NAMES.sub('_', output.lower())}"[:40] if several else kind
            found[name] = {"kind": kind, "output": output}
    return found


def complete_gates(
    gates: Mapping[str, Any], tasks: frozenset[str], metrics: Any = NO_METRICS
) -> dict[str, Any]:
    """Every precision's table in full: its own keys, then [gates.default]'s, then the standard's.

    Args:
        gates: tables as the file states them, ``default`` among them.
        tasks: what the outputs mean; limits that none of them has are absent.
        metrics: tables of [metrics], by name, as the file or `complete_metrics` gives them.
    """
    default, own_tasks = gates["default"], tasks - {"multi-output"}
    absent = dict.fromkeys(_absent_limits(own_tasks))
    if default.get("tolerances") != "standard":
        return {
            name: {**absent, **default, **table} if isinstance(table, Mapping) else table
            for name, table in gates.items()
        }
    completed = dict(gates)
    for precision, standard in STANDARD.items():
        own = gates.get(precision.value, {})
        margins = _standard_margins(standard, default, own, metrics)
        # A sample whose few labels are all near their threshold is a short vector, which any noise
        # turns: cosines say nothing about labels.
        unusual = {"min_cosine_p1": None} if own_tasks == {"multi-label"} else {}
        known = {**EVIDENCE, **standard, "max_abs_error": None, **unusual, **absent, **default}
        whole = {**known, **own, **margins} if isinstance(own, Mapping) else own
        completed[precision.value] = whole
    completed["default"] = completed[Precision.FP32.value] | {"tolerances": "standard"}
    return completed


def _absent_limits(tasks: frozenset[str]) -> tuple[str, ...]:
    """Limits that no output of these tasks has."""
    return (
        *(() if "classification" in tasks else CLASSIFICATION_LIMITS),
        *(() if tasks & DECIDING_TASKS else ("min_decision_agreement",)),
        *(DISTANCE_LIMITS if tasks == {"detection"} else ()),
    )


def _standard_margins(
    standard: Mapping[str, float], default: Mapping[str, Any], own: Any, metrics: Any
) -> dict[str, Any]:
    """The margins of all metrics: those that are stated, and the accuracy's for those that are not.

    Slices are held to a standard margin only where the overall one is standard too: a metric whose
    margin is stated is cut by what is stated.
    """
    tables = [table for table in (default, own) if isinstance(table, Mapping)]
    found: dict[str, Any] = {}
    stated = {
        name
        for table in tables
        if isinstance(margins := table.get("max_metric_loss"), Mapping)
        for name in margins
    }
    usual = [
        name
        for name, metric in (metrics.items() if isinstance(metrics, Mapping) else ())
        if isinstance(metric, Mapping)
        and metric.get("kind") in METRIC_TASKS.keys() - _NO_STANDARD
        and name not in stated
    ]
    for key, margin in (
        ("max_metric_loss", standard["max_accuracy_loss"]),
        ("max_slice_metric_loss", standard["max_slice_accuracy_loss"]),
    ):
        given = [table[key] for table in tables if key in table]
        if all(isinstance(each, Mapping) for each in given):  # else pydantic says what is wrong
            whole: dict[str, Any] = dict.fromkeys(usual, margin)
            for each in given:
                whole |= each
            if whole:
                found[key] = whole
    return found
