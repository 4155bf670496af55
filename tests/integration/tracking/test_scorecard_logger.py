"""Recording scorecards in a real MLflow database."""

import json
from pathlib import Path

import pytest

from enginegate.candidate import Engine, FileDigest, PrecisionProof
from enginegate.errors import TamperedError, TrackingError
from enginegate.evidence import Outcome, Scorecard
from enginegate.tracking import CandidateArtifacts, Tracker
from tests.fakes.evidence import INT8, finding, sha, verdict
from tests.fakes.qualification import qualification


@pytest.fixture
def exhibits(tmp_path):
    """Files of the INT8 candidate; the others have none."""
    (tmp_path / "model.onnx").write_bytes(b"engine bytes")
    (tmp_path / "layers.json").write_text('{"Layers": []}')
    (tmp_path / "optimised.onnx").write_bytes(b"the same model again")
    engine = Engine(
        candidate=INT8,
        filename="model.onnx",
        file=FileDigest.of(tmp_path / "model.onnx"),
        onnx_sha256=sha("0"),
        converted_sha256=sha("1"),
        converter="onnxruntime 1.31.1",
        calibration_sha256=sha("3"),
        builder="onnxruntime 1.31.1",
        target="cpu",
        inputs=(),
        outputs=(),
        max_batch_size=8,
        build_s=1.5,
        beside={name: FileDigest.of(tmp_path / name) for name in ("layers.json", "optimised.onnx")},
        proof=PrecisionProof(
            weighted_layers={"int8": 4},
            quantised_layers=4,
            device="CPUExecutionProvider",
            proven=True,
            detail="4 of 4 layers compute in int8",
        ),
    )
    config = 'platform: "onnxruntime_onnx"\n'
    return {
        INT8: CandidateArtifacts(
            (engine, tmp_path), config, '{"success": true}', plots={"tradeoff": b"<svg/>"}
        )
    }


def record(tracker, card, exhibits=None, report="# Report"):
    return tracker.record(card, exhibits or {}, report=report)


def children(tracker, run):
    experiment = tracker.client.get_run(run).info.experiment_id
    found = tracker.client.search_runs(
        [experiment], filter_string=f"tags.`mlflow.parentRunId` = '{run}'"
    )
    return {child.info.run_name.partition(":")[0]: child for child in found}


def artifact(tracker, run, path):
    return Path(tracker.client.download_artifacts(run, path)).read_bytes()


def test_qualification(tracker, exhibits):
    """One parent, one child a candidate; each finished, tagged, and with its evidence."""
    card = qualification(model="whole")
    run = record(tracker, card, exhibits)
    parent, runs = tracker.client.get_run(run), children(tracker, run)
    child = runs["onnxruntime-int8"]

    assert parent.info.status == "FINISHED"
    assert parent.data.tags["mlflow.note.content"] == "# Report"
    assert (parent.data.tags["kind"], parent.data.tags["gate"]) == ("qualification", "passed")
    assert parent.data.metrics["gate/candidates_passed"] == 2
    assert {r.info.status for r in runs.values()} == {"FINISHED"}
    assert {name: r.data.tags["gate"] for name, r in runs.items()} == {
        v.candidate.name: card.outcome(v.candidate).word for v in card.verdicts
    }
    assert child.data.params["max_queue_delay_us"] == "1000"
    assert child.data.metrics["perf/p99_ms"] == 6.25
    assert child.data.metrics["size/engine_kib"] == pytest.approx(12 / 1024, abs=1e-6)
    assert len(child.data.metrics) <= 15
    assert [d.dataset.name for d in child.inputs.dataset_inputs] == ["evaluation", "calibration"]


def test_artifacts(tracker, exhibits):
    """A candidate's files lie at fixed paths; the engine is a logged model of the same bytes."""
    run = record(tracker, qualification(model="files"), exhibits)
    child = children(tracker, run)["onnxruntime-int8"]
    ids = [output.model_id for output in child.outputs.model_outputs]
    model = tracker.client.get_logged_model(ids[0])
    names = {
        artifact.path
        for folder in ("", "evidence", "serving", "plots", "engine")
        for artifact in tracker.client.list_artifacts(child.info.run_id, folder)
        if not artifact.is_dir
    }

    assert names == {
        "gates.json",
        "slices.json",
        "evidence/verdict.json",
        "evidence/benchmark.json",
        "evidence/expectations.json",
        "serving/config.pbtxt",
        "plots/tradeoff.svg",
        "engine/manifest.json",
        "engine/layers.json",
    }
    verdict = json.loads(artifact(tracker, child.info.run_id, "evidence/verdict.json"))
    assert verdict["candidate"]["precision"] == "int8"
    assert (len(ids), model.status, model.model_type) == (1, "READY", "engine")
    stored = Path(model.artifact_location.removeprefix("file://"), "model.onnx")
    assert stored.read_bytes() == b"engine bytes"
    assert {metric.key for metric in model.metrics} >= {"perf/p99_ms", "size/engine_kib"}


def test_parent_run_says_what_was_asked_and_what_won(tracker, exhibits):
    """Limits and the SLO as parameters, the data as inputs, the winner's engine as its model."""
    card = qualification(model="parent")
    run = tracker.record(card, exhibits, params={"slo.p99_ms": "25.0"})
    parent = tracker.client.get_run(run)
    winner = children(tracker, run)["onnxruntime-int8"]

    assert parent.info.run_name == "parent v1: passed, onnxruntime-int8 wins"
    assert parent.data.params["slo.p99_ms"] == "25.0"
    assert parent.data.params["limit.accuracy_loss"] == "<= 0.01"
    assert [d.dataset.name for d in parent.inputs.dataset_inputs] == ["evaluation", "calibration"]
    assert [m.model_id for m in parent.outputs.model_outputs] == [
        m.model_id for m in winner.outputs.model_outputs
    ]


def test_latency_curve_is_one_metric_whose_step_is_the_load(tracker):
    """MLflow draws it as a line over offered requests a second."""
    run = record(tracker, qualification(model="curve"))
    child = children(tracker, run)["onnxruntime-int8"]

    history = tracker.client.get_metric_history(child.info.run_id, "perf_by_load/p99_ms")

    assert {m.step: m.value for m in history} == {100: 1.5625, 200: 3.125, 400: 6.25}


def test_every_qualification_has_a_view_of_its_own(tracker):
    """Its link names it; eight columns with the run's name, the winner first, four charts."""
    runs = [record(tracker, qualification(model="view", reason=why)) for why in ("one", "two")]
    experiment = tracker.client.get_experiment_by_name("promotions/view")

    for run in runs:
        key = tracker.comparison(run).runs_url.rpartition("viewStateShareKey=")[2]
        state = json.loads(experiment.tags[f"mlflow.sharedViewState.{key}"])
        found = tracker.client.search_runs(
            [experiment.experiment_id],
            filter_string=state["searchFilter"],
            order_by=[f"{state['orderByKey']} ASC"],
        )
        assert found[0].data.tags["outcome"] == "winner"
        assert len(found) == 8
        assert len(state["selectedColumns"]) == 7
        charts = [
            c for c in state["compareRunCharts"] if c["metricSectionId"] == "section-Decision"
        ]
        assert {c["metricKey"] for c in charts} <= set(found[0].data.metrics)
        assert len(charts) == 4
        assert [s["name"] for s in state["compareRunSections"] if s["display"]] == ["Decision"]
        columns = [c.partition(".")[2].strip("`") for c in state["selectedColumns"]]
        known = found[0].data.tags | found[0].data.params | {"size": "no engine was given here"}
        assert set(columns) <= set(known)


def test_experiment_note_is_one_sentence_and_the_link(tracker):
    """Of the newest qualification; what a person wrote there instead stays."""
    run = record(tracker, qualification(model="noted"))
    experiment = tracker.client.get_experiment_by_name("promotions/noted")

    note = experiment.tags["mlflow.note.content"]
    assert note.startswith("Newest: noted v1: onnxruntime-int8 wins, 400/s at p99 6.25 ms. [Comp")
    assert f"viewStateShareKey=enginegate-{run[:12]})" in note

    tracker.client.set_experiment_tag(experiment.experiment_id, "mlflow.note.content", "Ours.")
    record(tracker, qualification(model="noted", reason="another"))
    experiment = tracker.client.get_experiment_by_name("promotions/noted")
    assert experiment.tags["mlflow.note.content"] == "Ours."


def test_failed_engine_is_tagged_and_described_as_failed(tracker, exhibits):
    """MLflow itself calls it Ready; its metrics name the data they were made on."""
    failed = verdict(finding(Outcome.FAILED, gate="kl_p99"))
    card = qualification(model="failed", verdicts=(failed,), benchmarks=(), winner=None)
    run = record(tracker, card, exhibits)

    ids = children(tracker, run)["onnxruntime-int8"].outputs.model_outputs
    model = tracker.client.get_logged_model(ids[0].model_id)

    assert (model.name, model.tags["verdict"]) == ("onnxruntime-int8 failed", "failed")
    assert model.tags["mlflow.note.content"].startswith("FAILED: kl_p99")
    gates = [metric for metric in model.metrics if metric.key.startswith("gate/")]
    assert {(m.dataset_name, m.dataset_digest) for m in gates} == {("evaluation", sha("2")[:36])}


def test_registered_version_says_that_it_waits(tracker, registered):
    """In the description's first words, in tags, and beside what a person wrote there."""
    version = registered("waits")
    tracker.client.update_model_version("waits", str(version), "Trained by ada.")
    card = qualification(model="waits", model_uri=f"models:/waits/{version}")
    for reason in ("first", "second"):
        record(tracker, card.model_copy(update={"reason": reason}))

    found = tracker.client.get_model_version("waits", str(version))

    assert found.description.startswith("WAITING onnxruntime-int8\n")
    assert found.description.endswith("Trained by ada.")
    assert found.description.count("Written by Enginegate") == 1
    assert found.tags["enginegate.state"] == "waiting"
    assert found.tags["enginegate.candidate"] == "onnxruntime-int8"
    assert "/artifacts/decision.html" in found.tags["enginegate.scorecard_link"]


def test_version_that_cannot_be_described_loses_no_evidence(tracker, monkeypatch):
    """The registry may be read-only for whoever qualifies."""

    def refuse(*_):
        raise PermissionError("the registry is read-only")

    monkeypatch.setattr("enginegate.tracking.scorecard_logger.note_qualified", refuse)

    run = record(tracker, qualification(model="undescribed"))

    assert tracker.client.get_run(run).info.status == "FINISHED"


def test_page_is_drawn_of_the_filed_scorecard(tracker):
    """It shows the digest that people approve, and lies at the run's root."""
    card = qualification(model="paged")
    run = tracker.record(card, {}, make_page=lambda filed, *_: f"page of {filed.digest}")

    filed = card.model_copy(update={"mlflow_run": run})
    assert artifact(tracker, run, "decision.html").decode() == f"page of {filed.digest}"


def test_page_that_cannot_be_drawn_loses_no_evidence(tracker, caplog):
    """The scorecard is filed, and the log has what went wrong."""

    def broken(*_):
        raise ZeroDivisionError("no width")

    run = tracker.record(qualification(model="undrawn"), {}, make_page=broken)

    assert tracker.client.get_run(run).info.status == "FINISHED"
    assert "was not drawn" in caplog.text


def test_run_of_an_earlier_version_gets_its_page(tracker):
    """Recording once more files it; a page that is there stays."""
    card = qualification(model="earlier")
    run = record(tracker, card)

    for text in ("first", "second"):
        tracker.record(card, {}, make_page=lambda *_, text=text: text)

    assert artifact(tracker, run, "decision.html") == b"first"


def test_filed_scorecard_is_the_one_to_approve(tracker, tmp_path):
    """The scorecard in MLflow names its run, and the tag holds that scorecard's digest."""
    card = qualification(model="filed")
    run = record(tracker, card)
    (tmp_path / "card.json").write_bytes(artifact(tracker, run, "scorecard.json"))
    filed = Scorecard.read(tmp_path / "card.json")

    assert filed == card.model_copy(update={"mlflow_run": run})
    assert tracker.client.get_run(run).data.tags["scorecard_sha256"] == filed.digest


def test_same_evidence_is_recorded_once(tracker):
    """Recording again finds the run, also with the run's id filled in; other evidence is new."""
    card = qualification(model="once")
    first = record(tracker, card)

    again = record(tracker, card)
    filled_in = record(tracker, card.model_copy(update={"mlflow_run": first}))
    other = record(tracker, qualification(model="once", reason="another"))

    assert first == again == filled_in
    assert other != first
    assert len(children(tracker, first)) == 8


def test_tampered_engine_fails_the_run(tracker, exhibits, tmp_path):
    """Bytes that are not what was validated are not filed, and the run does not check finished."""
    (tmp_path / "model.onnx").write_bytes(b"engine bytez")
    card = qualification(model="tampered")

    with pytest.raises(TamperedError, match=r"model\.onnx is not the file"):
        record(tracker, card, exhibits)

    statuses = {run.data.tags["kind"]: run.info.status for run in runs_of(tracker, card)}
    assert statuses["qualification"] == "FAILED"
    (tmp_path / "model.onnx").write_bytes(b"engine bytes")
    assert tracker.client.get_run(record(tracker, card, exhibits)).info.status == "FINISHED"


def test_refused_files_fail_the_run(tracker, tmp_path):
    """When artifacts cannot be written, the error names MLflow's address; no run is left open."""
    (tmp_path / "file").write_text("where a folder should be")
    blocked = Tracker(tracker.tracking_uri, tmp_path / "file")
    card = qualification(model="blocked")

    with pytest.raises(TrackingError, match=r"sqlite:///.*could not record scorecard .*Not a dir"):
        record(blocked, card)

    assert {run.info.status for run in runs_of(tracker, card)} == {"FAILED"}


def test_killed_recording_is_closed(tracker):
    """What a killed process left running is closed by the next recording of the same evidence.

    A child that was finished by then is not taken for the whole.
    """
    card = qualification(model="killed")
    experiment = tracker.connection.experiment("promotions/killed")
    left = [
        tracker.client.create_run(experiment, tags={"evidence_sha256": card.digest, "kind": kind})
        for kind in ("qualification", "candidate")
    ]
    ids = [run.info.run_id for run in left]
    tracker.client.set_terminated(ids[1], "FINISHED")

    run = record(tracker, card)

    assert run not in ids
    assert [tracker.client.get_run(i).info.status for i in ids] == ["KILLED", "FINISHED"]


def test_long_report_is_cut_in_the_note_only(tracker):
    """MLflow limits descriptions; the file keeps all of it."""
    run = record(tracker, qualification(model="long"), report="x" * 20_000)

    assert tracker.client.get_run(run).data.tags["mlflow.note.content"].endswith("see report.md)")
    assert len(artifact(tracker, run, "report.md")) == 20_000


def test_comparison_names_every_child(tracker):
    """The link compares exactly the candidates of the run."""
    run = record(tracker, qualification(model="compared"))
    links = tracker.comparison(run)

    assert all(c.info.run_id in links.compare_url for c in children(tracker, run).values())
    assert links.runs_url.endswith(f"viewStateShareKey=enginegate-{run[:12]}")
    with pytest.raises(TrackingError, match="could not find the run"):
        tracker.comparison("0" * 32)


def test_deleted_experiment(tracker):
    """An experiment somebody deleted is not made again under their feet."""
    experiment = tracker.connection.experiment("promotions/deleted")
    tracker.client.delete_experiment(experiment)

    with pytest.raises(TrackingError, match=f"restore --experiment-id {experiment}"):
        record(tracker, qualification(model="deleted"))


def runs_of(tracker, card):
    experiment = tracker.connection.experiment(f"promotions/{card.model}")
    return tracker.client.search_runs([experiment])
