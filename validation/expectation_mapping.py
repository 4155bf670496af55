"""Great Expectations' results in our words: findings, and evidence to keep."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from enginegate.evidence import Finding, Outcome
from enginegate.records import canonical_json
from validation import gate
from validation.checks import GateCheck
from validation.reading import Counts
from validation.resampling import Resampled
from validation.statistics import Estimate, Pairs, Share

# Named by chance, or holding paths of this machine.
_VOLATILE = frozenset({"id", "batch_id", "exception_traceback"})


_STYLE = """<style>body{font:14px/1.4 sans-serif;margin:2em;max-width:70em}
table{border-collapse:collapse;width:100%}td,th{border:1px solid #ccc;padding:.3em .5em;
text-align:left;vertical-align:top}</style>"""
# What only works with a network, sells something, or differs from run to run.
_DROPPED = re.compile(
    r"<script\b.*?</script>|<style\b.*?</style>|<link\b[^>]*>|<img\b[^>]*>|<footer\b.*?</footer>"
    r"|<a\b[^>]*newsletter.*?</a>|<!--.*?-->",
    re.DOTALL,
)
_CHANGING = re.compile(
    r"\b\d{4}-?\d\d-?\d\dT\d\d:?\d\d:?\d\d(\.\d+)?Z?\b|\b[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}\b"
)


def self_contained(page: str) -> str:
    """A page of Data Docs that needs nothing from elsewhere, and is the same for the same data."""
    kept = _CHANGING.sub("", _DROPPED.sub("", page))
    return re.sub(r"\n\s*\n+", "\n", kept.replace("</head>", f"{_STYLE}</head>", 1))


def findings_from(
    result: Mapping[str, Any], checks: Sequence[GateCheck], *, rows: int
) -> tuple[Finding, ...]:
    """One finding for each check: those on all samples in order, then slices, most harm first.

    A check that raised, or has no result at all, is ERRORED.
    """
    results = {_key(entry): entry for entry in result["results"]}
    singles, families, broken = [], [], []
    for check in checks:
        entry = results.get((check.gate, check.scope))
        problem = "it has no result" if entry is None else _exception(entry)
        if entry is None or problem:
            broken.append(gate.errored(check, problem))
        elif check.in_family:
            families.append((check, _counts(entry["result"]["details"]["counts"])))
        else:
            singles.append(_single(check, entry, rows))
    return (*broken, *singles, *gate.judge_family(families))


def _single(check: GateCheck, entry: Mapping[str, Any], rows: int) -> Finding:
    """A finding from the result of one expectation on all samples."""
    found = entry["result"]
    if "details" in found:
        return Finding.model_validate(found["details"]["finding"])
    if check.gate == "nonfinite":
        finding = gate.judge_number(check, found["unexpected_count"], found["element_count"])
    else:
        value = found["observed_value"]
        finding = gate.judge_number(check, math.nan if value is None else float(value), rows)
    if finding.outcome is Outcome.PASSED and not entry["success"]:
        return gate.errored(check, f"Great Expectations refused what the gate passed: {found}")
    return finding


def _counts(found: Mapping[str, Any]) -> Counts:
    """A slice's counts, as `expectations` wrote them into a result."""
    if "lost" in found:
        return Pairs(**found)
    if "having" in found:
        return Share(**found)
    seen = found["estimate"]
    value, low, high = (float(seen[name]) for name in ("value", "low", "high"))
    estimate = Estimate(value, low, high, int(seen["samples"]))
    return Resampled(estimate, float(found["spread"]), found["detail"])


def _key(entry: Mapping[str, Any]) -> tuple[str, str]:
    meta = entry["expectation_config"]["meta"]
    return meta["gate"], meta["scope"]


def _exception(entry: Mapping[str, Any]) -> str:
    """What an expectation raised; empty if nothing. Metrics report theirs one level deeper."""
    info = entry["exception_info"]
    parts = [info] if "raised_exception" in info else list(info.values())
    raised = [str(part["exception_message"]) for part in parts if part["raised_exception"]]
    return "; ".join(dict.fromkeys(raised))


def evidence_of(result: Mapping[str, Any]) -> str:
    """The part of a result worth keeping, as canonical JSON: the same data give the same bytes."""
    kept = {
        "suite_name": result["suite_name"],
        "success": result["success"],
        "statistics": result["statistics"],
        "great_expectations_version": result["meta"]["great_expectations_version"],
        "results": sorted(result["results"], key=_key),
    }
    return canonical_json(_stable(kept)).decode()


def _stable(value: Any) -> Any:
    """JSON without what changes from run to run, and with NaN and infinities as text."""
    if isinstance(value, dict):
        return {key: _stable(item) for key, item in value.items() if key not in _VOLATILE}
    if isinstance(value, list):
        return [_stable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
