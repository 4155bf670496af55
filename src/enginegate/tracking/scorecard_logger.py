"""One scorecard in MLflow: a parent run, a nested run for each candidate, engines as models.

Files lie at the same paths in every candidate's run, which is what makes MLflow's side-by-side view
work. Everything goes through one client and explicit run ids, so no thread's active run matters.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from enginegate.atomic_io import write_file
from enginegate.candidate import Candidate, Engine
from enginegate.evidence import Outcome, Scorecard
from enginegate.records import Record
from enginegate.tracking.connection import Connection
from enginegate.tracking.metrics import (
    candidate_note,
    metrics_of,
    params_of,
    shared_tags,
    winner_metrics,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput

_NOTE_LENGTH = 7500
_DATASET_DIGEST_LENGTH = 36
_TEXTS = frozenset({".json", ".log"})  # what people read beside an engine; not its other forms
_NO_PARAMS: Mapping[str, str] = MappingProxyType({})


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
            return finished[0]
        for abandoned in self._runs(experiment, f"{same} = 'RUNNING'"):
            self.client.set_terminated(abandoned, "KILLED")
        kind, _, version = self.scorecard.model_uri.rpartition("/")
        which = f"version {version}" if kind.startswith("models:") else self.scorecard.model_uri
        name = f"{self.scorecard.model} {which}"
        tags = {"kind": "qualification", "evidence_sha256": evidence}
        with self.connection.run(experiment, name, tags) as run:
            scorecard = self.scorecard.model_copy(update={"mlflow_run": run})
            for verdict in scorecard.verdicts:
                self._record_candidate(experiment, run, scorecard, verdict.candidate)
            self._describe_parent(run, scorecard)
        return run

    def _runs(self, experiment: str, condition: str) -> list[str]:
        found = self.client.search_runs([experiment], filter_string=condition)
        return [str(run.info.run_id) for run in found]

    def _describe_parent(self, run: str, scorecard: Scorecard) -> None:
        winner = scorecard.winner
        own = self.artifacts.get(winner) if winner else None
        best = min((scorecard.outcome(v.candidate) for v in scorecard.verdicts), default=None)
        tags = {
            "gate": (Outcome.INCONCLUSIVE if best is None else best).word,
            "winner": winner.name if winner else "none",
            "mlflow.note.content": _note(self.report or scorecard.reason),
        }
        metrics = winner_metrics(scorecard, own.engine if own else None)
        self._batch(run, metrics, tags={**tags, **shared_tags(scorecard)})
        files = {"scorecard.json": scorecard.pretty_json(), "report.md": self.report.encode()}
        self._attach(run, files | dict(self.files))
        self.client.log_inputs(run, datasets=_datasets(scorecard))

    def _record_candidate(
        self, experiment: str, parent: str, scorecard: Scorecard, candidate: Candidate
    ) -> None:
        artifacts = self.artifacts.get(candidate, CandidateArtifacts())
        tags = {
            "kind": "candidate",
            "evidence_sha256": _evidence(scorecard),
            "gate": scorecard.outcome(candidate).word,
            "mlflow.parentRunId": parent,
            "mlflow.note.content": _note(candidate_note(scorecard, candidate)),
        }
        params = params_of(candidate, scorecard.benchmark(candidate))
        metrics = metrics_of(scorecard, candidate, artifacts.engine)
        with self.connection.run(experiment, candidate.name, tags) as run:
            model = self._log_engine(experiment, run, artifacts, params)
            self._batch(run, metrics, tags=shared_tags(scorecard), params=params, model=model)
            self._attach(run, _candidate_files(scorecard, candidate, artifacts))
            self.client.log_inputs(run, datasets=_datasets(scorecard))

    def _log_engine(
        self, experiment: str, run: str, artifacts: CandidateArtifacts, params: dict[str, str]
    ) -> str | None:
        """Log the engine's bytes as a logged model of the run; its digest is checked first."""
        if artifacts.built is None:
            return None
        from mlflow.entities import LoggedModelOutput  # noqa: PLC0415

        engine, folder = artifacts.built
        engine.file.check(folder / engine.filename)
        model = self.client.create_logged_model(
            experiment,
            name=engine.candidate.name,
            source_run_id=run,
            params=params,
            tags={"sha256": engine.file.sha256, "target": engine.target, "builder": engine.builder},
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

    def _batch(
        self,
        run: str,
        metrics: Mapping[str, float],
        *,
        tags: Mapping[str, str],
        params: Mapping[str, str] = _NO_PARAMS,
        model: str | None = None,
    ) -> None:
        from mlflow.entities import Metric, Param, RunTag  # noqa: PLC0415

        stamp = int(self.scorecard.created_at.timestamp() * 1000)
        self.client.log_batch(
            run,
            metrics=[Metric(name, n, stamp, 0, model_id=model) for name, n in metrics.items()],
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
