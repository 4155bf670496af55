"""A report as Markdown: for MLflow, for Prefect, and for the form a person answers."""

from collections.abc import Iterable, Iterator

from enginegate.evidence import Scorecard
from enginegate.messages import escape_markdown
from enginegate.report.content import (
    COLUMNS,
    NO_SIZES,
    EngineSizes,
    binding,
    columns_of,
    obstacles,
    row_of,
    sentences,
)
from enginegate.report.devices import device_sentences, device_table


def scorecard_markdown(scorecard: Scorecard, sizes: EngineSizes = NO_SIZES) -> str:
    """Sentences, table, and why candidates did not pass; ``sizes`` are engine bytes."""
    lines = [*(f"- {escape_markdown(sentence)}" for sentence in sentences(scorecard)), ""]
    lines += [_row(columns_of(scorecard)), "|" + " --- |" * len(COLUMNS)]
    for verdict in scorecard.verdicts:
        lines.append(_row(row_of(scorecard, verdict.candidate, sizes)))
    lines += _obstacles(scorecard)
    table = device_table(scorecard)
    if table.devices:
        lines += ["", "## Kinds of device", ""]
        lines += [f"- {escape_markdown(sentence)}" for sentence in device_sentences(scorecard)]
        lines += ["", _row(table.columns), "|" + " --- |" * len(table.columns)]
        lines += [_row((name, *(cell.text for cell in cells))) for name, cells in table.rows]
    for view in scorecard.by_device[1:]:
        lines += ["", f"### {view.device}", ""]
        lines += [_row(columns_of(view)), "|" + " --- |" * len(COLUMNS)]
        lines += [_row(row_of(view, verdict.candidate)) for verdict in view.verdicts]
        lines += _obstacles(view)
    return "\n".join(lines) + "\n"


def _obstacles(scorecard: Scorecard) -> Iterator[str]:
    for obstacle in obstacles(scorecard):
        yield from ("", f"**{obstacle.names}**: {obstacle.outcome.word}", "")
        yield from (f"- {escape_markdown(line)}" for line in obstacle.lines)


def approval_markdown(scorecard: Scorecard, sizes: EngineSizes = NO_SIZES) -> str:
    """All that a person needs to decide, in one text that needs no other page."""
    data = scorecard.data.model_dump().items()
    asked = f"May {scorecard.winner} serve {scorecard.model}?"
    lines = [
        f"# {asked if scorecard.winner else f'Nothing to approve for {scorecard.model}'}",
        "",
        binding(scorecard),
        "",
        scorecard_markdown(scorecard, sizes),
        "## What this was made from",
        "",
        f"- model {scorecard.model_uri}; ONNX sha256 {scorecard.onnx_sha256}",
        f"- policy sha256 {scorecard.policy_sha256}",
        *(f"- {name} data: {f'sha256 {digest}' if digest else 'none'}" for name, digest in data),
        f"- made at {scorecard.created_at.isoformat(timespec='seconds')}",
        f"- MLflow run {scorecard.mlflow_run or 'none'}",
        *(
            f"- {name}: {escape_markdown(value)}"
            for name, value in sorted(scorecard.environment.items())
        ),
    ]
    return "\n".join(lines) + "\n"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(escape_markdown(cell) for cell in cells) + " |"
