"""Great Expectations' results in our words, from results written by hand."""

import json

import pytest

from enginegate.evidence import Outcome
from validation.checks import GateCheck
from validation.expectations import evidence_of, findings_from

QUIET = {"raised_exception": False, "exception_message": None, "exception_traceback": None}


def _result(gate, found, *, success=True, exception=None):
    return {
        "suite_name": "evaluation",
        "success": success,
        "statistics": {"evaluated_expectations": 1},
        "meta": {"great_expectations_version": "1.24.1", "run_id": "changes"},
        "results": [
            {
                "success": success,
                "expectation_config": {
                    "id": "changes",
                    "kwargs": {"batch_id": "changes"},
                    "meta": {"gate": gate, "scope": "evaluation"},
                },
                "result": found,
                "exception_info": exception or QUIET,
            }
        ],
    }


def _finding(result, gate, gates, rows=900):
    (finding,) = findings_from(result, [GateCheck.of(gate, "evaluation", gates)], rows=rows)
    return finding


@pytest.mark.parametrize(
    ("gate", "found", "expected"),
    [
        ("samples", {"observed_value": 900}, Outcome.PASSED),
        ("nonfinite", {"unexpected_count": 0, "element_count": 900}, Outcome.PASSED),
        ("nonfinite", {"unexpected_count": 0, "element_count": 0}, Outcome.INCONCLUSIVE),
        ("max_abs_error", {"observed_value": 0.5}, Outcome.PASSED),
    ],
)
def test_built_in_expectations(gates, gate, found, expected):
    """A number that Great Expectations measured is judged by the gate; no rows is no success."""
    assert _finding(_result(gate, found), gate, gates).outcome is expected


@pytest.mark.parametrize("value", [None, float("nan"), 7.0])
def test_bad_maximum(gates, value):
    """A maximum that is beyond the limit, or missing though there are rows, failed."""
    result = _result("max_abs_error", {"observed_value": value}, success=False)

    assert _finding(result, "max_abs_error", gates).outcome is Outcome.FAILED


def test_never_better_than_great_expectations(gates):
    """A number the gate would pass, but Great Expectations refused, is a fault to look at."""
    result = _result("samples", {"observed_value": 900}, success=False)

    assert _finding(result, "samples", gates).outcome is Outcome.ERRORED


@pytest.mark.parametrize("nested", [False, True])
def test_exceptions(gates, nested):
    """What an expectation or one of its metrics raised is an errored finding with its message."""
    raised = {
        "raised_exception": True,
        "exception_message": "column kl_nats does not exist",
        "exception_traceback": "File /home/somebody/secret.py",
    }
    result = _result(
        "kl_p99", {}, success=False, exception={"metric": raised} if nested else raised
    )

    finding = _finding(result, "kl_p99", gates)

    assert finding.outcome is Outcome.ERRORED
    assert "column kl_nats does not exist" in finding.reason
    assert "secret" not in evidence_of(result)


def test_evidence_keeps_what_matters():
    """Evidence drops what changes from run to run, and writes infinities as text."""
    kept = json.loads(evidence_of(_result("max_abs_error", {"observed_value": float("inf")})))

    assert kept["results"][0]["result"] == {"observed_value": "inf"}
    assert kept["great_expectations_version"] == "1.24.1"
    assert "changes" not in json.dumps(kept)
