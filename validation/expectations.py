"""Great Expectations as the gate engine: checks become a suite, its results become findings.

A rule exists once, in ``gate``. Great Expectations selects the rows, measures and keeps the record.
Its own expectations are used where one fits, where none does, those of `OURS`.

Each of ours succeeds only when the gate passed. A slice is the same expectation with a row
condition; whether one that did not pass failed is decided over all slices together (see ``gate``).

Importing Great Expectations takes seconds, so it happens at the first judgement.
"""

import functools
import logging
import math
import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray
from pydantic import Field

from enginegate.evidence import Finding, Outcome
from enginegate.policy.gates import Gates
from enginegate.records import Record, canonical_json
from validation import gate
from validation.agreement import OutputComparison
from validation.checks import MAXIMA, GateCheck, checks_for
from validation.gate import Counts, counts_of, notes_on
from validation.outputs import CLASSIFY, OutputSpec
from validation.own_score import held_back, own_scores
from validation.resampling import Resampled
from validation.score import paired_form
from validation.statistics import Estimate, Pairs, Share

if TYPE_CHECKING:
    import pandas as pd

OURS: Mapping[str, str] = MappingProxyType(
    {
        "ExpectColumnPairedLossToBeAtMost": (
            "The share lost is at most the limit: upper end of Tango's paired interval."
        ),
        "ExpectColumnTrueShareToBeAtLeast": (
            "The share of true values is at least the limit: lower end of Wilson's interval."
        ),
        "ExpectColumnMeanShareToBeAtLeast": (
            "The mean of shares is at least the limit: lower end of its BCa interval."
        ),
        "ExpectColumnUpperQuantileToBeAtMost": (
            "The 99th percentile is at most the limit: upper end of its rank interval."
        ),
        "ExpectColumnLowerQuantileToBeAtLeast": (
            "The 1st percentile is at least the limit: lower end of its rank interval."
        ),
        "ExpectColumnResampledLossToBeAtMost": (
            "The loss of a score is at most the limit: upper end of its paired BCa interval."
        ),
        "ExpectColumnSignalToNoiseToBeAtLeast": (
            "The signal to noise ratio in dB is at least the limit: lower end of its BCa interval."
        ),
    }
)
_METRIC = "column.enginegate.values"
_SHOWN_ROWS = 20
# Fewer samples are measured from one table of all columns, which a run copies several times: 300 MB
# each time. More cost half a second for each column.
_AT_ONCE = 2_000_000
_LOADING = threading.Lock()


class Judged(Record):
    """What one comparison showed."""

    scope: str
    findings: tuple[Finding, ...]
    result_json: str = Field(description="Great Expectations' result, kept as evidence")


def judge_comparison(
    comparison: OutputComparison, gates: Gates, asked: OutputSpec = CLASSIFY
) -> Judged:
    """Judge a comparison by every gate that applies to it.

    Args:
        comparison: reference and candidate on the same samples.
        gates: the policy's limits for the candidate's precision.
        asked: what was compared.
    """
    whole = comparison.with_parts().with_variances(asked)
    checks = checks_for(whole, gates, asked)
    result = _measured(checks, whole)
    own = own_scores(whole, gates, asked)
    findings = held_back(findings_from(result, checks, rows=len(whole)), own, gates)
    return Judged(
        scope=whole.scope,
        findings=(*findings, *own, *notes_on(whole, gates, asked)),
        result_json=evidence_of(result),
    )


def _measured(checks: Sequence[GateCheck], whole: OutputComparison) -> dict[str, Any]:
    """Great Expectations' result on every check; of many samples, a column at a time.

    Each expectation reads one column and at most one slice column, so that both ways agree.
    """
    if len(whole) < _AT_ONCE:
        found: dict[str, Any] = _run(checks, whole.frame(), name=whole.scope).to_json_dict()
        return found
    groups: dict[tuple[str, str], list[GateCheck]] = {}
    for check in checks:
        cut = check.part[0] if check.part is not None else ""
        groups.setdefault((check.rule.column or "nonfinite", cut), []).append(check)
    return _merged(
        [
            _run(group, whole.frame({column}, {cut}), name=whole.scope).to_json_dict()
            for (column, cut), group in groups.items()
        ]
    )


def _merged(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One result of several, as one run of all their expectations gives it."""
    counts = [result["statistics"] for result in results]
    total = {name: sum(each[name] for each in counts) for name in counts[0]}
    evaluated = total["evaluated_expectations"]
    total["success_percent"] = total["successful_expectations"] / evaluated * 100
    return {
        **results[0],
        "success": all(result["success"] for result in results),
        "statistics": total,
        "results": [entry for result in results for entry in result["results"]],
    }


def _run(checks: Sequence[GateCheck], frame: "pd.DataFrame", *, name: str) -> Any:
    vendor = _vendor()
    context = vendor.gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False, "metric_calculations": False}
    suite = vendor.gx.ExpectationSuite(
        name=name, expectations=[_expectation(vendor, check) for check in checks]
    )
    asset = context.data_sources.add_pandas(name).add_dataframe_asset(name)
    definition = vendor.gx.ValidationDefinition(
        name=name,
        data=asset.add_batch_definition_whole_dataframe(name),
        suite=context.suites.add(suite),
    )
    checkpoint = vendor.gx.Checkpoint(
        name=name,
        validation_definitions=[context.validation_definitions.add(definition)],
        actions=[],
        result_format={
            "result_format": "SUMMARY",
            "partial_unexpected_count": _SHOWN_ROWS,
            "unexpected_index_column_names": ["sample_id"],
        },
    )
    run = context.checkpoints.add(checkpoint).run(batch_parameters={"dataframe": frame})
    return next(iter(run.run_results.values()))


@dataclass(frozen=True, slots=True)
class _Vendor:
    """Great Expectations, with our expectations registered by name."""

    gx: Any
    expectations: Any
    column: Any
    ours: Mapping[str, Any]


def _vendor() -> _Vendor:
    with _LOADING:  # candidates are judged in threads, and registering twice is refused or logged
        return _load()


@functools.cache
def _load() -> _Vendor:
    os.environ["GX_ANALYTICS_ENABLED"] = "false"  # it is read at import
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", ImportWarning)  # of Google's libraries, if one is installed
        import great_expectations as gx  # noqa: PLC0415 - takes seconds
        from great_expectations import expectations  # noqa: PLC0415
        from great_expectations.expectations.row_conditions import Column  # noqa: PLC0415
    # It sets loggers of its own to INFO, and whoever owns the root handler prints what they say.
    for name in ("great_expectations", *logging.root.manager.loggerDict):
        if name.startswith("great_expectations"):
            logging.getLogger(name).setLevel(logging.WARNING)
    _register_metric()
    return _Vendor(
        gx, expectations, Column, {name: _define(name, doc) for name, doc in OURS.items()}
    )


def _register_metric() -> None:
    """A column's values after the row condition, as an array: what our expectations count in."""
    from great_expectations.execution_engine.pandas_execution_engine import (  # noqa: PLC0415
        PandasExecutionEngine,
    )
    from great_expectations.expectations.metrics.column_aggregate_metric_provider import (  # noqa: PLC0415
        ColumnAggregateMetricProvider,
        column_aggregate_value,
    )

    class ColumnEnginegateValues(ColumnAggregateMetricProvider):
        metric_name = _METRIC
        value_keys = ()

        @column_aggregate_value(engine=PandasExecutionEngine)
        def _pandas(cls, column: "pd.Series[Any]", **_: Any) -> NDArray[Any]:  # noqa: N805 - Great Expectations calls it with the class
            return column.to_numpy()


def _define(name: str, doc: str) -> Any:
    """Define and register an expectation that counts a column and asks the gate."""
    from great_expectations.expectations.expectation import (  # noqa: PLC0415
        ColumnAggregateExpectation,
    )

    def validate(self: Any, metrics: Mapping[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        check = _check_of(self.check)
        return _answer(check, counts_of(check, metrics[_METRIC]))

    members = {
        "__doc__": doc,
        "__module__": __name__,
        "__annotations__": {"check": dict[str, Any]},
        "metric_dependencies": (_METRIC,),
        "success_keys": ("check",),
        "_validate": validate,
    }
    return type(name, (ColumnAggregateExpectation,), members)


def _check_of(kwargs: Mapping[str, Any]) -> GateCheck:
    """The check that an expectation carries; JSON made a list of its slice."""
    part = kwargs["part"]
    return GateCheck(**{**kwargs, "part": None if part is None else (part[0], part[1])})


def _answer(check: GateCheck, counts: Counts) -> dict[str, Any]:
    """A result for Great Expectations. A slice reports its counts: it is judged with the others."""
    finding = gate.judge_counts(check, counts)
    details = {"finding": finding.model_dump(mode="json")}
    if check.in_family:
        details = {"counts": asdict(counts)}
    return {
        "success": finding.outcome is Outcome.PASSED,
        "result": {"observed_value": finding.value, "details": details},
    }


def _expectation(vendor: _Vendor, check: GateCheck) -> Any:
    given: dict[str, Any] = {
        "meta": {"gate": check.gate, "scope": check.scope},
        "severity": "warning" if check.advisory else "critical",
        "description": str(check),
    }
    if check.gate == "samples":
        row_count = vendor.expectations.ExpectTableRowCountToBeBetween
        return row_count(min_value=int(check.limit), **given)
    if check.gate == "nonfinite":
        in_set = vendor.expectations.ExpectColumnValuesToBeInSet
        return in_set(column="nonfinite", value_set=[False], **given)
    if check.gate in MAXIMA:
        maximum = vendor.expectations.ExpectColumnMaxToBeBetween
        return maximum(column=check.rule.column, max_value=check.limit, **given)
    if check.part is not None and check.only is None:
        column, value = check.part
        given["row_condition"] = vendor.column(f"slice.{column}") == value
    kind = vendor.ours[_expectation_name(check)]
    return kind(column=check.rule.column, check=asdict(check), **given)


def _expectation_name(check: GateCheck) -> str:
    """Which of `OURS` states a check."""
    if check.kind:
        paired = paired_form(check.kind) == "binary"
        return f"ExpectColumn{'Paired' if paired else 'Resampled'}LossToBeAtMost"
    return _BY_COLUMN.get(check.rule.column, "ExpectColumnUpperQuantileToBeAtMost")


_BY_COLUMN: Mapping[str, str] = MappingProxyType(
    {
        "accuracy_delta": "ExpectColumnPairedLossToBeAtMost",
        "top1_match": "ExpectColumnTrueShareToBeAtLeast",
        "decision_agreement": "ExpectColumnMeanShareToBeAtLeast",
        "power": "ExpectColumnSignalToNoiseToBeAtLeast",
        "cosine": "ExpectColumnLowerQuantileToBeAtLeast",
    }
)


# Named by chance, or holding paths of this machine.
_VOLATILE = frozenset({"id", "batch_id", "exception_traceback"})


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
