"""What Prefect's pages show of a run: its name and state, its tasks' names, its artifacts."""

import json
import logging

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterName,
)
from prefect.client.schemas.sorting import FlowRunSort

from flows.qualify import qualify

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("flows")]


def newest_run(beginning):
    """The run that was started last, of those whose names begin so."""
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(name=FlowRunFilterName(like_=beginning)),
            sort=FlowRunSort.START_TIME_DESC,
            limit=1,
        )
    return found[0]


def artifacts_of(run):
    """A run's artifacts by key; a key that is there twice would be a fault."""
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]))
        )
    assert len({each.key for each in found}) == len(found)
    return {each.key: each for each in found}


def test_qualification_shows_candidates_and_progress(qualified, family, caplog):
    """Found again, it is named by version, and each benchmark's bar is at its end."""
    caplog.set_level(logging.INFO)

    card = qualify(family.policy)

    run = newest_run("qualify tiny v1")
    assert (run.name, run.state.name) == ("qualify tiny v1", "Completed")
    assert run.state.message == f"winner {card.winner}: {card.reason}"
    shown = artifacts_of(run)
    for found in qualified.benchmarks:
        bar = shown[f"benchmark-tiny-{found.candidate}"]
        assert (bar.type, bar.data) == ("progress", 100.0)
        assert bar.description.startswith(f"**{found.candidate}** of tiny: ")
    names = {getattr(record, "task_run_name", None) for record in caplog.records}
    assert {f"benchmark-{v.candidate}" for v in card.verdicts} <= names
    assert {f"validate-{v.candidate}" for v in card.verdicts} <= names
    assert "export-tiny-v1" in names


def test_qualification_leaves_its_result_on_its_page(family, qualified, caplog):
    """Table, scorecard and links, each once; the log ends with winner, why and what to do next."""
    caplog.set_level(logging.INFO)

    card = qualify(family.policy)

    shown = artifacts_of(newest_run("qualify tiny v1"))
    rows = json.loads(shown["candidates-tiny"].data)
    assert [row["outcome"] for row in rows] == [
        card.outcome(v.candidate).word for v in card.verdicts
    ]
    assert f"{qualified.winner} (winner)" in {row["candidate"] for row in rows}
    assert card.digest in shown["scorecard-tiny"].data
    assert f"enginegate approve {card.digest[:12]}" in shown["links-tiny"].data
    last = [r.getMessage() for r in caplog.records if r.name == "enginegate.result"]
    assert last == [
        f"winner of tiny v1: {card.winner}",
        f"why: {card.reason}",
        (
            f"next: enginegate approve {card.digest[:12]} --reason WHY, "
            f"then enginegate promote {family.policy} {card.digest[:12]}"
        ),
    ]
