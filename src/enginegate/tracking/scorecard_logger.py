"""One scorecard in MLflow: a parent run, a nested run for each candidate, engines as models.

Files lie at the same paths in every candidate's run, which is what makes MLflow's side-by-side view
work; tables among them have what the few metrics leave out. Everything goes through one client and
explicit run ids, so no thread's active run matters.
"""

import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from enginegate.atomic_io import write_file
from enginegate.candidate import Candidate, Engine
from enginegate.errors import TrackingError
from enginegate.evidence import Scorecard
from enginegate.records import Record
from enginegate.repository.store.scorecard_history import ScorecardHistory
from enginegate.tracking import shared_view, summary
from enginegate.tracking.connection import Connection
from enginegate.tracking.evidence_tables import evidence_tables, tables_tag
from enginegate.tracking.metrics import (
    CURVE,
    is_of_evaluation,
    latency_curve,
    limits_of,
    metrics_of,
    params_of,
    shared_tags,
    winner_metrics,
)
from enginegate.tracking.page_filing import PageMaker, file_page, is_page_filed
from enginegate.tracking.registry_notes import note_qualified
from enginegate.tracking.ui_links import page_place, runs_place, view_key

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, Metric

_NOTE_LENGTH = 7500
_DATASET_DIGEST_LENGTH = 36
_NOTE = "mlflow.note.content"
# An experiment's note that begins otherwise is somebody's own, and stays.
_OUR_NOTE = "Newest: "
_log = logging.getLogger("enginegate.tracking")
_TEXTS = frozenset({".json", ".log"})  # what people read beside an engine; not its other forms


@dataclass(frozen=True, slots=True)
class CandidateArtifacts:
    """Files beside one candidate's numbers; empty where there is none.

    Attributes:
        built: the engine and its folder in the store, as `Workspace.engine` returns them.
        config_pbtxt: how Triton served it.
        expectations_json: the Great Expectations result its findings came from.
        plots: pictures as SVG, by name.
    """

    built: tuple[Engine, Path] | None = None
    config_pbtxt: str = ""
    expectations_json: str = ""
    plots: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def engine(self) -> Engine | None:
        """The engine, where one was built."""
        return self.built[0] if self.built else None


@dataclass(frozen=True, slots=True)
class ScorecardLogger:
    """One call of `Tracker.record`."""

    connection: Connection
    scorecard: Scorecard
    artifacts: Mapping[Candidate, CandidateArtifacts]
    report: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    make_page: PageMaker | None = None
    further: Mapping[str, Mapping[Candidate, CandidateArtifacts]] = field(default_factory=dict)

    @property
    def client(self) -> "MlflowClient":
        return self.connection.client

    def record(self) -> str:
        """The finished run of this evidence, or a new one; see `Tracker.record`."""
        evidence = _evidence(self.scorecard)
        same = f"tags.evidence_sha256 = '{evidence}' and attributes.status"
        experiment = self.connection.experiment(experiment_name(self.scorecard.model))
        finished = self._runs(experiment, f"{same} = 'FINISHED' and tags.kind = 'qualification'")
        if finished:
            self._file_page(finished[0], once=True)
            return finished[0]
        for abandoned in self._runs(experiment, f"{same} = 'RUNNING'"):
            self.client.set_terminated(abandoned, "KILLED")
        tags = {"kind": "qualification", "evidence_sha256": evidence}
        with self.connection.run(experiment, summary.run_name(self.scorecard), tags) as run:
            scorecard = self.scorecard.model_copy(update={"mlflow_run": run})
            # The last is the newest, which MLflow shows first where nothing else orders them.
            for device in reversed(scorecard.devices[1:]):
                on_device = replace(self, artifacts=self.further.get(device, {}))
                on_device._record_all(experiment, run, scorecard.on(device))  # noqa: SLF001
            own = scorecard.on(scorecard.device) if scorecard.device else scorecard
            models = self._record_all(experiment, run, own)
            self._describe_parent(run, scorecard, models)
            self._file_page(run)
            self._show(experiment, run, scorecard)
        return run

    def _record_all(
        self, experiment: str, run: str, scorecard: Scorecard
    ) -> dict[Candidate, str | None]:
        """The runs of all candidates of one kind of device, the winner's last."""
        return {
            candidate: self._record_candidate(experiment, run, scorecard, candidate)
            for candidate in reversed(scorecard.ranked)
        }

    def _file_page(self, run: str, *, once: bool = False) -> None:
        """The decision page as it is before anything happened; later ones come with the log."""
        if self.make_page is None or (once and is_page_filed(self.connection, run)):
            return
        scorecard = self.scorecard.model_copy(update={"mlflow_run": run})
        file_page(self.connection, scorecard, ScorecardHistory(), self.make_page)

    def _runs(self, experiment: str, condition: str) -> list[str]:
        found = self.client.search_runs([experiment], filter_string=condition)
        return [str(run.info.run_id) for run in found]

    def _describe_parent(
        self, run: str, scorecard: Scorecard, models: Mapping[Candidate, str | None]
    ) -> None:
        from mlflow.entities import LoggedModelOutput  # noqa: PLC0415

        winner = scorecard.winner
        own = self.artifacts.get(winner) if winner else None
        tags = {
            "gate": summary.best_outcome(scorecard).word,
            "winner": winner.name if winner else "none",
            _NOTE: _note(self.report or scorecard.reason),
        }
        metrics = winner_metrics(scorecard, own.engine if own else None)
        self._batch(
            run,
            self._metrics(metrics),
            tags={**tags, **shared_tags(scorecard)},
            params={**limits_of(scorecard), **self.params},
        )
        files = {"scorecard.json": scorecard.pretty_json(), "report.md": self.report.encode()}
        self._attach(run, files | dict(self.files))
        self.client.log_inputs(run, datasets=_datasets(scorecard))
        model = models.get(winner) if winner else None
        if model is not None:
            self.client.log_outputs(run, [LoggedModelOutput(model, 0)])

    def _show(self, experiment: str, run: str, scorecard: Scorecard) -> None:
        """The view that links open, the experiment's note, and the registered version's state."""
        named = {
            name
            for candidate in scorecard.ranked
            for name in metrics_of(scorecard, candidate, self._engine(candidate))
        }
        curved = [b for b in scorecard.benchmarks if latency_curve(b)]
        slowest_ms = max((b.p99_at_slo.value_ms for b in curved if b.p99_at_slo), default=None)
        state = shared_view.view_state(
            run, {*named, CURVE} if curved else named, slowest_ms=slowest_ms
        )
        key = f"{shared_view.TAG}{view_key(run)}"
        self.client.set_experiment_tag(experiment, key, state)
        note = str(self.client.get_experiment(experiment).tags.get(_NOTE, ""))
        if not note or note.startswith(_OUR_NOTE):
            links = f"[Compare]({runs_place(experiment, run)})"
            if self.make_page is not None:
                links += f" · [decision page]({page_place(experiment, run)})"
            said = f"{_OUR_NOTE}{summary.result_sentence(scorecard)} {links}"
            self.client.set_experiment_tag(experiment, _NOTE, said)
        try:
            with self.connection.explained(f"describe {scorecard.model_uri}"):
                note_qualified(self.connection, scorecard, experiment)
        except TrackingError as error:
            # A registry may be read-only for whoever qualifies, and the evidence is filed by now.
            _log.warning("The registered version does not say how it ended: %s", error)

    def _engine(self, candidate: Candidate) -> Engine | None:
        return self.artifacts.get(candidate, CandidateArtifacts()).engine

    def _record_candidate(
        self, experiment: str, parent: str, scorecard: Scorecard, candidate: Candidate
    ) -> str | None:
        """One candidate's run; its logged model's id, where an engine was built."""
        artifacts = self.artifacts.get(candidate, CandidateArtifacts())
        files = _candidate_files(scorecard, candidate, artifacts)
        tags = {
            "kind": "candidate",
            "evidence_sha256": _evidence(self.scorecard),
            **({"device": scorecard.device} if scorecard.device else {}),
            "gate": scorecard.outcome(candidate).word,
            "mlflow.parentRunId": parent,
            _NOTE: _note(summary.candidate_note(scorecard, candidate)),
            **tables_tag(files),
        }
        benchmark = scorecard.benchmark(candidate)
        params = params_of(candidate, benchmark)
        metrics = metrics_of(scorecard, candidate, artifacts.engine)
        name = summary.candidate_run_name(scorecard, candidate)
        with self.connection.run(experiment, name, tags) as run:
            model = self._log_engine(experiment, run, artifacts, params)
            self._batch(
                run,
                self._metrics(metrics, model) + self._curve(latency_curve(benchmark), model),
                tags={
                    **shared_tags(scorecard),
                    **summary.table_tags(scorecard, candidate, artifacts.engine),
                },
                params={**params, summary.RUNTIME: summary.runtime_of(candidate)},
            )
            self._attach(run, files)
            self.client.log_inputs(run, datasets=_datasets(scorecard))
        return model

    def _log_engine(
        self, experiment: str, run: str, artifacts: CandidateArtifacts, params: dict[str, str]
    ) -> str | None:
        """Log the engine's bytes as a logged model of the run; its digest is checked first."""
        if artifacts.built is None:
            return None
        from mlflow.entities import LoggedModelOutput  # noqa: PLC0415

        engine, folder = artifacts.built
        engine.file.check(folder / engine.filename)
        scorecard, candidate = self.scorecard, engine.candidate
        model = self.client.create_logged_model(
            experiment,
            name=summary.engine_name(scorecard, candidate),
            source_run_id=run,
            params=params,
            tags={
                "sha256": engine.file.sha256,
                "target": engine.target,
                "builder": engine.builder,
                "verdict": scorecard.outcome(candidate).word,
                "model_uri": scorecard.model_uri,
                _NOTE: _note(summary.engine_note(scorecard, candidate)),
            },
            model_type="engine",
        )
        try:
            self.client.log_model_artifact(model.model_id, str(folder / engine.filename))
        except BaseException:
            self.client.finalize_logged_model(model.model_id, "FAILED")
            raise
        self.client.finalize_logged_model(model.model_id, "READY")
        self.client.log_outputs(run, [LoggedModelOutput(model.model_id, 0)])
        return str(model.model_id)

    def _metrics(self, metrics: Mapping[str, float], model: str | None = None) -> list["Metric"]:
        """A logged model's metrics name the data that they were made on."""
        from mlflow.entities import Metric  # noqa: PLC0415

        data = {
            "dataset_name": "evaluation",
            "dataset_digest": self.scorecard.data.evaluation[:_DATASET_DIGEST_LENGTH],
        }
        return [
            Metric(
                name,
                number,
                self._stamp,
                0,
                model_id=model,
                **(data if model and is_of_evaluation(name) else {}),
            )
            for name, number in metrics.items()
        ]

    def _curve(self, curve: Mapping[int, float], model: str | None) -> list["Metric"]:
        from mlflow.entities import Metric  # noqa: PLC0415

        return [
            Metric(CURVE, p99_ms, self._stamp, rate, model_id=model)
            for rate, p99_ms in curve.items()
        ]

    @property
    def _stamp(self) -> int:
        return int(self.scorecard.created_at.timestamp() * 1000)

    def _batch(
        self,
        run: str,
        metrics: list["Metric"],
        *,
        tags: Mapping[str, str],
        params: Mapping[str, str],
    ) -> None:
        from mlflow.entities import Param, RunTag  # noqa: PLC0415

        self.client.log_batch(
            run,
            metrics=metrics,
            params=[Param(name, value) for name, value in params.items()],
            tags=[RunTag(name, value) for name, value in tags.items()],
        )

    def _attach(self, run: str, files: Mapping[str, bytes]) -> None:
        with tempfile.TemporaryDirectory(prefix="enginegate-mlflow-") as folder:
            for name, content in files.items():
                if content:
                    write_file(Path(folder, name), content)
            self.client.log_artifacts(run, folder)


def _candidate_files(
    scorecard: Scorecard, candidate: Candidate, artifacts: CandidateArtifacts
) -> dict[str, bytes]:
    files = {
        "evidence/verdict.json": _json(scorecard.verdict(candidate)),
        "evidence/benchmark.json": _json(scorecard.benchmark(candidate)),
        "evidence/expectations.json": artifacts.expectations_json.encode(),
        "serving/config.pbtxt": artifacts.config_pbtxt.encode(),
        "engine/manifest.json": _json(artifacts.engine),
        **evidence_tables(scorecard, candidate),
    }
    files |= {f"engine/{name}": content for name, content in _texts_beside(artifacts)}
    return files | {f"plots/{name}.svg": svg for name, svg in artifacts.plots.items()}


def _texts_beside(artifacts: CandidateArtifacts) -> Iterator[tuple[str, bytes]]:
    """How the engine was built and what it is made of: the builder's log, the inspector's layers.

    Raises:
        TamperedError: a file is not the one that was recorded.
    """
    if artifacts.built is None:
        return
    engine, folder = artifacts.built
    for name, digest in engine.beside.items():
        if Path(name).suffix in _TEXTS:
            digest.check(folder / name)
            yield name, (folder / name).read_bytes()


def experiment_name(model: str) -> str:
    """The experiment a model's qualifications are filed in."""
    return f"promotions/{model}"


def _evidence(scorecard: Scorecard) -> str:
    """The scorecard's digest before it knew its run: by which a second recording is recognised."""
    return scorecard.model_copy(update={"mlflow_run": ""}).digest


def _json(record: Record | None) -> bytes:
    return record.pretty_json() if record else b""


def _note(text: str) -> str:
    """MLflow keeps at most 8000 characters of a note."""
    return text if len(text) <= _NOTE_LENGTH else f"{text[:_NOTE_LENGTH]}\n\n(cut; see report.md)"


def _datasets(scorecard: Scorecard) -> "list[DatasetInput]":
    """The data as MLflow inputs; its digests there are short, so the tags hold the whole ones."""
    from mlflow.entities import Dataset, DatasetInput, InputTag  # noqa: PLC0415

    return [
        DatasetInput(
            Dataset(
                name,
                digest[:_DATASET_DIGEST_LENGTH],
                source_type="local",
                source=json.dumps({"sha256": digest}),
            ),
            [InputTag("mlflow.data.context", name)],
        )
        for name, digest in scorecard.data.model_dump().items()
        if digest
    ]
