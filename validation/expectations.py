"""Great Expectations as the gate engine: checks become a suite, its results become findings.

A rule exists once, in ``gate``. Great Expectations selects the rows, measures and keeps the record.
Its own expectations are used where one fits, ours where none does:

- ``ExpectColumnPairedLossToBeAtMost``: upper end of Tango's interval of the accuracy lost.
- ``ExpectColumnTrueShareToBeAtLeast``: lower end of Wilson's interval of a share.
- ``ExpectColumnUpperQuantileToBeAtMost``: upper end of a 99th percentile's interval.

Each of ours succeeds only when the gate passed. A slice is the same expectation with a row
condition; whether one that did not pass failed is decided over all slices together (see ``gate``).

Importing Great Expectations takes seconds, so it happens at the first judgement.
"""

import functools
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray
from pydantic import Field

from enginegate.canonical import Record
from enginegate.evidence import Finding, Outcome
from enginegate.policy import Gates
from validation import gate
from validation.agreement import Comparison
from validation.checks import Check, checks_for, slice_sizes
from validation.gate import Counts, Tail
from validation.statistics import Pairs, Share
from validation.translate import evidence_of, findings_from

if TYPE_CHECKING:
    import pandas as pd

_METRIC = "column.enginegate.values"
_SHOWN_ROWS = 20
_LOADING = threading.Lock()


class Judged(Record):
    """What one comparison showed."""

    scope: str
    findings: tuple[Finding, ...]
    result_json: str = Field(description="Great Expectations' result, kept as evidence")


def judge(comparison: Comparison, gates: Gates) -> Judged:
    """Judge a comparison by every gate that applies to it.

    Args:
        comparison: reference and candidate on the same samples.
        gates: the policy's limits for the candidate's precision.
    """
    checks = checks_for(comparison, gates)
    result = run_suite(checks, comparison.frame(), name=comparison.scope)
    notes = [gate.judge_slice_sizes(comparison.scope, slice_sizes(comparison), gates)]
    if comparison.scope == "evaluation" and comparison.accuracy_delta is None:
        notes.append(gate.unlabelled(comparison.scope, gates))
    return Judged(
        scope=comparison.scope,
        findings=(
            *findings_from(result, checks, rows=len(comparison)),
            *(note for note in notes if note is not None),
        ),
        result_json=evidence_of(result),
    )


def run_suite(checks: Sequence[Check], frame: "pd.DataFrame", *, name: str) -> dict[str, Any]:
    """Run the checks as one suite over a comparison's frame; Great Expectations' result as JSON."""
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
    result: dict[str, Any] = next(iter(run.run_results.values())).to_json_dict()
    return result


@dataclass(frozen=True, slots=True)
class _Vendor:
    """Great Expectations, with our expectations registered."""

    gx: Any
    expectations: Any
    column: Any
    paired_loss: Any
    true_share: Any
    upper_quantile: Any


def _vendor() -> _Vendor:
    with _LOADING:  # candidates are judged in threads, and registering twice is refused or logged
        return _load()


@functools.cache
def _load() -> _Vendor:
    os.environ["GX_ANALYTICS_ENABLED"] = "false"  # it is read at import
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import great_expectations as gx  # noqa: PLC0415 - takes seconds
        from great_expectations import expectations  # noqa: PLC0415
        from great_expectations.expectations.row_conditions import Column  # noqa: PLC0415
    _register_metric()
    return _Vendor(
        gx=gx,
        expectations=expectations,
        column=Column,
        paired_loss=_define(
            "ExpectColumnPairedLossToBeAtMost",
            "The accuracy lost is at most the limit: upper end of Tango's paired interval.",
            lambda _, values: Pairs.of(values),
        ),
        true_share=_define(
            "ExpectColumnTrueShareToBeAtLeast",
            "The share of true values is at least the limit: lower end of Wilson's interval.",
            lambda _, values: Share.of(values),
        ),
        upper_quantile=_define(
            "ExpectColumnUpperQuantileToBeAtMost",
            "The 99th percentile is at most the limit: upper end of its rank interval.",
            Tail.of,
        ),
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


def _define(name: str, doc: str, count: Callable[[Check, NDArray[Any]], Counts]) -> Any:
    """Define and register an expectation that counts a column and asks the gate."""
    from great_expectations.expectations.expectation import (  # noqa: PLC0415
        ColumnAggregateExpectation,
    )

    def validate(self: Any, metrics: Mapping[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        check = _check_of(self.check)
        return _answer(check, count(check, metrics[_METRIC]))

    members = {
        "__doc__": doc,
        "__module__": __name__,
        "__annotations__": {"check": dict[str, Any]},
        "metric_dependencies": (_METRIC,),
        "success_keys": ("check",),
        "_validate": validate,
    }
    return type(name, (ColumnAggregateExpectation,), members)


def _check_of(kwargs: Mapping[str, Any]) -> Check:
    """The check that an expectation carries; JSON made a list of its slice."""
    part = kwargs["part"]
    return Check(**{**kwargs, "part": None if part is None else (part[0], part[1])})


def _answer(check: Check, counts: Counts) -> dict[str, Any]:
    """A result for Great Expectations. A slice reports its counts: it is judged with the others."""
    finding = gate.judge(check, counts)
    details = {"finding": finding.model_dump(mode="json")}
    if check.in_family:
        details = {"counts": asdict(counts)}
    return {
        "success": finding.outcome is Outcome.PASSED,
        "result": {"observed_value": finding.value, "details": details},
    }


def _expectation(vendor: _Vendor, check: Check) -> Any:
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
    if check.gate == "max_abs_error":
        maximum = vendor.expectations.ExpectColumnMaxToBeBetween
        return maximum(column="max_abs_error", max_value=check.limit, **given)
    if check.part is not None:
        column, value = check.part
        given["row_condition"] = vendor.column(f"slice.{column}") == value
    kind, measured = {
        "accuracy_loss": (vendor.paired_loss, "accuracy_delta"),
        "slice_accuracy_loss": (vendor.paired_loss, "accuracy_delta"),
        "top1_agreement": (vendor.true_share, "top1_match"),
        "slice_top1_agreement": (vendor.true_share, "top1_match"),
        "kl_p99": (vendor.upper_quantile, "kl_nats"),
    }[check.gate]
    return kind(column=measured, check=asdict(check), **given)
