"""Candidates against FP32, on labelled data and on the shadow sample."""

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.context import TaskRunContext
from prefect.futures import PrefectFuture, as_completed
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner
from pydantic import Field

from enginegate import __version__
from enginegate.candidate import (
    ONNX_FILE,
    Engine,
    OnnxModel,
    Sha256,
    Unbuilt,
)
from enginegate.content_store import ContentFolder, delete_folder, use_folder
from enginegate.data import DataSet
from enginegate.data_sources import load_data
from enginegate.engines import engine_kind, open_reference, runnable_here
from enginegate.errors import EnginegateError, InputError, tool_errors
from enginegate.evidence import Finding, Outcome, Verdict
from enginegate.policy.building import EngineTables
from enginegate.policy.data import DataSource
from enginegate.policy.gates import Evaluation, Gates, gates_for
from enginegate.precision import judge_range, open_emulated
from enginegate.records import Record, canonical_json, sha256_bytes
from enginegate.report.progress import told_as
from enginegate.workspace import Workspace, remembered
from tasks.run_page import of_candidate
from validation.agreement import OutputComparison, compare
from validation.chunks import (
    Chunk,
    chunks_of,
    compare_chunk,
    followed,
    gather,
    observe_chunk,
    open_comparison,
)
from validation.expectations import judge_comparison
from validation.outputs import OutputSpec
from validation.shadow import judge_noise
from validation.verdict import for_errored, for_unbuilt, for_undecidable, for_unrunnable, verdict_on

_log = logging.getLogger("enginegate.validate")
_EMULATED_SAMPLES = 1000
# Chunks on their way for each worker: one that runs, and one that waits, so that none is idle.
_AHEAD = 2


@dataclass(frozen=True, slots=True)
class EvaluationSamples:
    """What candidates are judged on: labelled data, and a sample of live requests if there is one.

    Attributes:
        notes: findings about the live sample itself.
    """

    evaluation: DataSource
    shadow: DataSet | None = None
    notes: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class Observed:
    """What FP32 answers on one set of data, and how much it differs from itself."""

    data: DataSet
    data_sha256: Sha256
    chunks: tuple[Chunk, ...]
    noise: tuple[OutputComparison, ...]


@dataclass(frozen=True, slots=True)
class ReferenceOutputs:
    """What every candidate is compared with.

    Attributes:
        asked: what each output that is compared means.
        how: how candidates are run over the data, as FP32 was.
    """

    onnx_sha256: Sha256
    asked: tuple[OutputSpec, ...]
    how: Evaluation
    evaluation: Observed
    shadow: Observed | None
    notes: tuple[Finding, ...]

    @property
    def observed(self) -> tuple[Observed, ...]:
        """The evaluation data, then the shadow sample if there is one."""
        return (self.evaluation, *([self.shadow] if self.shadow else []))


class Judgement(Record):
    """A verdict with the Great Expectations results it came from, as JSON by scope."""

    verdict: Verdict
    results: dict[str, str] = Field(default_factory=dict)


@task(task_run_name="reference", cache_policy=NO_CACHE)
@told_as("FP32 reference")
def observe(
    source: ContentFolder[OnnxModel],
    samples: EvaluationSamples,
    asked: tuple[OutputSpec, ...],
    how: Evaluation,
    workspace: Workspace,
) -> ReferenceOutputs:
    """Run FP32 twice on everything: once to compare with, once to know its own noise."""

    def run_fp32(data: DataSet, scope: str) -> Observed:
        data.check_fits(source.value.inputs)
        return _observed(source, data, scope, asked, how, workspace)

    return ReferenceOutputs(
        onnx_sha256=source.value.file.sha256,
        asked=asked,
        how=how,
        evaluation=run_fp32(load_data(samples.evaluation), "evaluation"),
        shadow=run_fp32(samples.shadow, "shadow") if samples.shadow is not None else None,
        notes=samples.notes,
    )


@task(task_run_name=of_candidate("validate"), cache_policy=NO_CACHE)
@told_as("judge", lambda made: (made.verdict.outcome.word, made.verdict.outcome.word))
def validate(
    attempt: ContentFolder[Engine] | Unbuilt,
    reference: ReferenceOutputs,
    gates: Mapping[Any, Gates],
    tables: EngineTables,
    workspace: Workspace,
) -> Judgement:
    """The verdict on one candidate; the same engine, data and gates are judged once.

    Args:
        attempt: the candidate.
        reference: what it is compared with.
        gates: the limits, by precision.
        tables: how it was calibrated, to emulate what no device here can run.
        workspace: keeps verdicts, and what is being compared.
    """
    if isinstance(attempt, Unbuilt):
        if attempt.undecidable:
            return Judgement(verdict=for_undecidable(attempt))
        found = for_unbuilt(attempt.candidate, attempt.why, broke=attempt.broke)
        return Judgement(verdict=found)
    engine = attempt.value
    obstacle = runnable_here(engine)
    if obstacle is not None and not _emulable(engine):
        _log.info("%s: no device can run it here", engine.candidate)
        return Judgement(verdict=for_unrunnable(engine, obstacle))
    limits = gates_for(gates, engine.candidate.precision)

    def judge_it() -> Judgement:
        if obstacle is None:
            return _judge(attempt, reference, limits, workspace.results / "chunks")
        return _emulate(attempt, reference, limits, tables, why=obstacle)

    key = _key(engine, reference, limits, obstacle)
    judgement = remembered(
        workspace.results / "verdicts" / f"{key}.json",
        Judgement,
        judge_it,
        worth_keeping=lambda made: made.verdict.outcome is not Outcome.ERRORED,
    )
    note = " (no device can run it here; emulated)" if obstacle else ""
    _log.info("%s: %s%s", engine.candidate, judgement.verdict.outcome.word, note)
    return judgement


@task(task_run_name="chunk-{chunk.name}", cache_policy=NO_CACHE, persist_result=False)
def run_chunk(chunk: Chunk, engine: ContentFolder[Engine] | None, folder: Path) -> None:
    """One chunk through a candidate, or through FP32 itself."""
    if engine is None:
        observe_chunk(chunk, folder)
    else:
        compare_chunk(chunk, engine, folder)


def _judge(
    built: ContentFolder[Engine], reference: ReferenceOutputs, gates: Gates, root: Path
) -> Judgement:
    keys = [_chunks_key(built.value, reference, part) for part in reference.observed]
    folders = [use_folder(root / key) for key in keys]
    candidate = built.value.candidate
    try:
        with tool_errors(f"{candidate}"), open_comparison(built) as compare_on:
            for part, folder in zip(reference.observed, folders, strict=True):
                what = f"{candidate} on {part.chunks[0].scope}"
                with tool_errors(what):
                    if len(part.chunks) == 1:
                        compare_on(part.chunks[0], folder)
                    else:
                        _run(reference.how, part.chunks, built, folder, what)
    except EnginegateError as error:
        return Judgement(verdict=for_errored(built.value, str(error)))
    judged = [
        judge_comparison(gather(folder, part.chunks, part.data, place), gates, asked)
        for part, folder in zip(reference.observed, folders, strict=True)
        for place, asked in enumerate(reference.asked)
    ]
    noise = [judge_noise(found, gates) for part in reference.observed for found in part.noise]
    for folder in folders:
        with suppress(OSError):
            delete_folder(folder)
    return Judgement(
        verdict=verdict_on(built.value, judged, *noise, *reference.notes),
        results={part.scope: part.result_json for part in judged},
    )


def _emulable(engine: Engine) -> bool:
    """Whether its arithmetic differs from FP32's in a way that this machine can imitate."""
    return engine_kind(engine.candidate.kind).is_emulable(engine.candidate.precision)


def _emulate(
    built: ContentFolder[Engine],
    reference: ReferenceOutputs,
    gates: Gates,
    tables: EngineTables,
    *,
    why: str,
) -> Judgement:
    """What can be said without the device: range decides, accuracy is only shown."""
    engine, chunk = built.value, reference.evaluation.chunks[0]
    candidate, calibration = engine.candidate, tables.calibration_data
    rows = chunk.data.head(_EMULATED_SAMPLES)
    try:
        with (
            tool_errors(f"{candidate}, emulated"),
            open_emulated(
                chunk.onnx.folder / ONNX_FILE,
                candidate,
                data=load_data(calibration) if calibration else None,
                rules=tables.calibration,
                keep=engine.kept_nodes,
                converted_sha256=engine.converted_sha256,
            ) as runner,
            open_reference(chunk.onnx.value, chunk.onnx.folder) as fp32,
        ):
            answers, expected = runner.run(dict(rows.inputs)), fp32.run(dict(rows.inputs))
            found = [judge_range(runner.report(), "emulated")]
    except EnginegateError as error:
        _log.info("%s: could not be emulated: %s", candidate, error)
        return Judgement(verdict=for_unrunnable(engine, why))
    for asked in reference.asked:
        compared = compare(expected, answers, rows, "emulated", asked=asked)
        shown = judge_comparison(compared, gates, asked).findings
        found += [finding.model_copy(update={"advisory": True}) for finding in shown]
    return Judgement(verdict=for_unrunnable(engine, why, *found))


def _observed(
    source: ContentFolder[OnnxModel],
    data: DataSet,
    scope: str,
    asked: tuple[OutputSpec, ...],
    how: Evaluation,
    workspace: Workspace,
) -> Observed:
    size, digest = how.chunk_samples, data.sha256
    key = {"onnx": source.value.file.sha256, "data": digest, "chunk": size, "version": __version__}
    root = use_folder(workspace.results / "reference" / sha256_bytes(canonical_json(key)))
    chunks = tuple(
        chunks_of(
            data,
            size,
            lambda rows, start: Chunk(rows, start, scope, asked, source, root / "outputs"),
        )
    )
    noise = root / f"noise-{sha256_bytes(canonical_json([a.digest for a in asked]))[:12]}"
    _run(how, chunks, None, noise, f"FP32 on {scope}")
    found = tuple(gather(noise, chunks, data, place) for place in range(len(asked)))
    return Observed(data, digest, chunks, found)


def _run(
    how: Evaluation,
    chunks: tuple[Chunk, ...],
    engine: ContentFolder[Engine] | None,
    folder: Path,
    what: str,
) -> None:
    """All chunks, several at a time; a single one needs no worker."""
    if len(chunks) == 1:
        run_chunk.fn(chunks[0], engine, folder)
        return
    with _workers(how) as runner, _sending_little(how):
        # Each chunk carries its inputs to its worker: all of them at once would fill this process.
        queue = (
            runner.submit(run_chunk, {"chunk": chunk, "engine": engine, "folder": folder})
            for chunk in chunks
        )
        finished = _finished(queue, _AHEAD * how.workers)
        for done in followed(finished, len(chunks), what):
            done.result()


@contextmanager
def _sending_little(how: Evaluation) -> Iterator[None]:
    """Keep what the task around this one was given from travelling with every chunk.

    Prefect sends the parameters of the task that submits to other processes: all data, with each
    chunk of them.
    """
    if how.runner == "threads":
        yield
        return
    hidden = TaskRunContext.__var__.set(None)  # type: ignore[arg-type]
    try:
        yield
    finally:
        TaskRunContext.__var__.reset(hidden)


def _finished(queue: Iterator[PrefectFuture[Any]], at_once: int) -> Iterator[PrefectFuture[Any]]:
    """Each future when it is done; the next is taken from the queue when another is."""
    pending = list(islice(queue, at_once))
    while pending:
        done = next(iter(as_completed(pending)))
        pending.remove(done)
        pending += islice(queue, 1)
        yield done


@contextmanager
def _workers(how: Evaluation) -> Iterator[TaskRunner[Any]]:
    """The policy's task runner.

    Raises:
        InputError: the package that it needs is not installed.
    """
    open_runner = {"threads": _threads, "dask": _dask, "ray": _ray}[how.runner]
    try:
        runner: TaskRunner[Any] = open_runner(how)
    except ImportError as error:
        raise InputError(
            f"The policy's evaluation.runner is {how.runner}, and prefect-{how.runner} is not "
            f"installed: {error}. Run: pip install 'enginegate[{how.runner}]', or set runner to "
            "threads."
        ) from error
    with runner:
        yield runner


def _threads(how: Evaluation) -> TaskRunner[Any]:
    return ThreadPoolTaskRunner(max_workers=how.workers)


def _dask(how: Evaluation) -> Any:
    from prefect_dask.task_runners import DaskTaskRunner  # noqa: PLC0415

    if how.cluster is not None:
        return DaskTaskRunner(address=how.cluster)
    # Its dashboard would listen on every interface.
    local = {"n_workers": how.workers, "threads_per_worker": 1, "dashboard_address": None}
    return DaskTaskRunner(cluster_kwargs=local)


def _ray(how: Evaluation) -> Any:
    from prefect_ray.task_runners import RayTaskRunner  # noqa: PLC0415

    if how.cluster is not None:
        return RayTaskRunner(address=how.cluster)
    local = {
        "num_cpus": how.workers,
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
        "log_to_driver": False,
        # Its workers know no other way to modules that are not installed.
        "runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}},
    }
    return RayTaskRunner(init_kwargs=local)


def _chunks_key(engine: Engine, reference: ReferenceOutputs, part: Observed) -> Sha256:
    """Digest of everything that decides a chunk's columns."""
    deciding: dict[str, Any] = {
        "enginegate": __version__,
        "engine": engine.digest,
        "reference": reference.onnx_sha256,
        "data": part.data_sha256,
        "scope": part.chunks[0].scope,
        "asked": _digests(reference.asked),
    }
    return sha256_bytes(canonical_json(deciding))


def _key(engine: Engine, reference: ReferenceOutputs, gates: Gates, obstacle: str | None) -> Sha256:
    """Digest of everything a verdict depends on."""
    deciding = {
        "enginegate": __version__,
        "engine": engine.digest,
        "reference": reference.onnx_sha256,
        "evaluation": reference.evaluation.data_sha256,
        "shadow": reference.shadow.data_sha256 if reference.shadow else None,
        "notes": [note.digest for note in reference.notes],
        "asked": _digests(reference.asked),
        "gates": gates.digest,
        "obstacle": obstacle,
    }
    return sha256_bytes(canonical_json(deciding))


def _digests(asked: Iterable[OutputSpec]) -> list[str]:
    return [question.digest for question in asked]
