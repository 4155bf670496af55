"""Standard tolerances: limits for a model that nobody has measured yet, by precision.

A policy takes them because its file says ``tolerances = "standard"`` under ``[gates.default]``; it
may state some limits itself. Where each number comes from: docs/gates.md.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from enginegate.candidate import Precision
from enginegate.policy.gates import CLASSIFICATION_LIMITS

# About the evidence, for every precision. 95 % is one-sided 2.5 %, as ICH E9 prefers; 400 samples
# are a few more than the 368 that bound a 99th percentile; a slice of 73 can settle a loss of 5 %.
EVIDENCE: Mapping[str, float] = MappingProxyType(
    {"confidence": 0.95, "min_samples": 400, "min_slice_samples": 75}
)


def _standard(
    *, loss: float, slice_loss: float, agreement: float, kl: float, sqnr: float, cosine: float
) -> Mapping[str, float]:
    return MappingProxyType(
        {
            "max_accuracy_loss": loss,
            "max_slice_accuracy_loss": slice_loss,
            "min_top1_agreement": agreement,
            "max_kl_p99_nats": kl,
            "min_sqnr_db": sqnr,
            "min_cosine_p1": cosine,
        }
    )


_TEN_BITS = _standard(
    loss=0.005, slice_loss=0.05, agreement=0.99, kl=1e-3, sqnr=50.0, cosine=0.9999
)
STANDARD: Mapping[Precision, Mapping[str, float]] = MappingProxyType(
    {
        Precision.FP32: _standard(
            loss=0.005, slice_loss=0.05, agreement=0.99, kl=1e-5, sqnr=100.0, cosine=0.99999
        ),
        Precision.TF32: _TEN_BITS,
        Precision.FP16: _TEN_BITS,
        Precision.BF16: _standard(
            loss=0.005, slice_loss=0.05, agreement=0.98, kl=2e-2, sqnr=32.0, cosine=0.999
        ),
        Precision.INT8: _standard(
            loss=0.01, slice_loss=0.08, agreement=0.97, kl=1e-1, sqnr=20.0, cosine=0.98
        ),
        Precision.FP8: _standard(
            loss=0.01, slice_loss=0.08, agreement=0.97, kl=1e-1, sqnr=15.0, cosine=0.97
        ),
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


def complete_gates(gates: Mapping[str, Any], tasks: frozenset[str]) -> dict[str, Any]:
    """Every precision's table in full: its own keys, then [gates.default]'s, then the standard's.

    Args:
        gates: tables as the file states them, ``default`` among them.
        tasks: what the outputs mean; limits that none of them has are absent.
    """
    default = gates["default"]
    absent = {} if "classification" in tasks else dict.fromkeys(CLASSIFICATION_LIMITS)
    if default.get("tolerances") != "standard":
        return {
            name: {**absent, **default, **table} if isinstance(table, Mapping) else table
            for name, table in gates.items()
        }
    completed = dict(gates)
    for precision, standard in STANDARD.items():
        own = gates.get(precision.value, {})
        known = {**EVIDENCE, **standard, "max_abs_error": None, **absent, **default}
        completed[precision.value] = {**known, **own} if isinstance(own, Mapping) else own
    completed["default"] = completed[Precision.FP32.value] | {"tolerances": "standard"}
    return completed
