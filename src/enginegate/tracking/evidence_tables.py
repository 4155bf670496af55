"""Every finding of a candidate as two tables: ``gates.json`` and ``slices.json``.

A run's metrics are the few that people compare. The rest is here, emulated numbers included, in the
form that MLflow's UI draws as a table (columns and rows, as pandas' ``orient="split"``).
"""

import json
from collections.abc import Iterable

from enginegate.candidate import Candidate
from enginegate.evidence import Finding, Scorecard

GATES, SLICES = "gates.json", "slices.json"
# The tag by which MLflow's UI knows which artifacts it can draw as tables.
TABLES_TAG = "mlflow.loggedArtifacts"
_EMULATED = "emulated"
_COLUMNS = (
    "gate",
    "on",
    "slice",
    "outcome",
    "value",
    "low",
    "high",
    "limit",
    "unit",
    "samples",
    "decides",
    "emulated",
    "reason",
)


def evidence_tables(scorecard: Scorecard, candidate: Candidate) -> dict[str, bytes]:
    """Both files of a candidate, by path; a table without a row is left out."""
    verdict, benchmark = scorecard.verdict(candidate), scorecard.benchmark(candidate)
    found = (*(verdict.findings if verdict else ()), *(benchmark.findings if benchmark else ()))
    tables = {
        GATES: [f for f in found if not _slice_of(f)],
        SLICES: [f for f in found if _slice_of(f)],
    }
    return {path: _table(findings) for path, findings in tables.items() if findings}


def tables_tag(paths: Iterable[str]) -> dict[str, str]:
    """The tag that names those of a run's files that are tables."""
    shown = [{"path": path, "type": "table"} for path in paths if path in {GATES, SLICES}]
    return {TABLES_TAG: json.dumps(shown)} if shown else {}


def _table(findings: Iterable[Finding]) -> bytes:
    rows = [_row(finding) for finding in findings]
    return json.dumps({"columns": _COLUMNS, "data": rows}, ensure_ascii=False, indent=1).encode()


def _row(finding: Finding) -> list[object]:
    scope, _, part = finding.scope.partition("/")
    limit = "" if finding.limit is None else f"{finding.relation or ''} {finding.limit:g}".strip()
    return [
        finding.gate,
        scope,
        part,
        finding.outcome.word,
        finding.value,
        finding.low,
        finding.high,
        limit,
        finding.unit,
        finding.samples,
        not finding.advisory,
        scope == _EMULATED,
        finding.reason,
    ]


def _slice_of(finding: Finding) -> str:
    return finding.scope.partition("/")[2]
