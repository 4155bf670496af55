"""The tables beside a candidate's few metrics."""

import json

from enginegate.evidence import Outcome
from enginegate.tracking.evidence_tables import evidence_tables, tables_tag
from tests.fakes.evidence import INT8, finding, scorecard, verdict
from tests.fakes.qualification import qualification

CARD = qualification()


def rows(content):
    table = json.loads(content)
    return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


def test_every_finding_is_in_one_of_two_tables():
    """Slices apart, because there may be hundreds; the benchmark's findings are gates."""
    tables = evidence_tables(CARD, INT8)
    found = CARD.verdict(INT8).findings + CARD.benchmark(INT8).findings

    gates, slices = rows(tables["gates.json"]), rows(tables["slices.json"])

    assert len(gates) + len(slices) == len(found)
    assert {row["slice"] for row in slices} == {"digit=8", "stroke=thin"}
    assert {"p99_ms", "accuracy_loss", "max_abs_error"} <= {row["gate"] for row in gates}
    loss = next(row for row in gates if row["gate"] == "accuracy_loss")
    assert (loss["value"], loss["limit"], loss["decides"]) == (0.00217628, "<= 0.01", True)


def test_emulated_numbers_are_marked():
    """They are in the table, and decide nothing."""
    emulated = finding(Outcome.PASSED, value=0.1, advisory=True).model_copy(
        update={"scope": "emulated"}
    )

    (row,) = rows(
        evidence_tables(scorecard(verdicts=(verdict(emulated),), benchmarks=()), INT8)["gates.json"]
    )

    assert (row["emulated"], row["decides"]) == (True, False)


def test_tables_are_named_for_mlflows_page():
    """It draws those files as tables that a tag of the run names."""
    tag = tables_tag(["evidence/verdict.json", *evidence_tables(CARD, INT8)])

    assert json.loads(tag["mlflow.loggedArtifacts"]) == [
        {"path": "gates.json", "type": "table"},
        {"path": "slices.json", "type": "table"},
    ]
    assert tables_tag(["evidence/verdict.json"]) == {}
