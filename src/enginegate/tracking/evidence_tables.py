"""Every finding of a candidate as two tables: ``gates.json`` and ``slices.json``.

A run's metrics are the few that people compare. The rest is here, emulated numbers included, in the
form that MLflow's UI draws as a table (columns and rows, as pandas' ``orient="split"``).
"""

import json
from collections.abc import Iterable, Sequence

from enginegate.candidate import Candidate
from enginegate.evidence import Finding, Scorecard

GATES, SLICES = "gates.json", "slices.json"
# The tag by which MLflow's UI knows which artifacts it can draw as tables.
TABLES_TAG = "mlflow.loggedArtifacts"
_EMULATED = "emulated"
# The first ones are in sight without scrolling; a reason has number, limit and count in words.
_COLUMNS = (
    *("gate", "on", "outcome", "decides", "reason"),
    *("value", "low", "high", "limit", "unit", "samples", "emulated"),
)
_DIGITS = 6


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


def _table(findings: Sequence[Finding]) -> bytes:
    sliced = any(_slice_of(finding) for finding in findings)
    columns = ("slice", *_COLUMNS) if sliced else _COLUMNS
    rows = [[*([_slice_of(f)] if sliced else []), *_row(f)] for f in findings]
    return json.dumps({"columns": columns, "data": rows}, ensure_ascii=False, indent=1).encode()


def _row(finding: Finding) -> list[object]:
    limit = "" if finding.limit is None else f"{finding.relation or ''} {finding.limit:g}".strip()
    scope = finding.scope.partition("/")[0]
    return [
        finding.gate,
        scope,
        finding.outcome.word,
        not finding.advisory,
        finding.reason,
        *(_short(number) for number in (finding.value, finding.low, finding.high)),
        limit,
        finding.unit,
        finding.samples,
        scope == _EMULATED,
    ]


def _short(number: float | None) -> float | None:
    """As many digits as people read; ``evidence/verdict.json`` has all."""
    return None if number is None else float(f"{number:.{_DIGITS}g}")


def _slice_of(finding: Finding) -> str:
    return finding.scope.partition("/")[2]
