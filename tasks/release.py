"""Publishing a release, rolling it back, and updating MLflow."""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.transactions import Transaction

from enginegate.candidate import Candidate, Engine, Precision, Sha256, registered_version
from enginegate.data import Tensors
from enginegate.data_sources import load_data
from enginegate.decision import Decision, Promise, Release, RenewedPromise
from enginegate.devices import PartStore
from enginegate.devices.part import MANIFEST
from enginegate.engines import open_engine, serving
from enginegate.errors import (
    ApprovalError,
    EnginegateError,
    InputError,
    RepositoryError,
    TamperedError,
    TrackingError,
)
from enginegate.evidence import Benchmark, Scorecard, Verdict
from enginegate.machine import user_at_host
from enginegate.policy.data import DataSource
from enginegate.policy.operating import Ensemble, LiveTables
from enginegate.report import page_of_log
from enginegate.repository import (
    AuditRecord,
    Golden,
    Layout,
    Package,
    Target,
    open_target,
    origin,
    record_act,
)
from enginegate.repository.ensemble.composition import Composed, as_ensemble, composes
from enginegate.repository.ensemble.record_golden import record_golden_on_own_server
from enginegate.repository.recovery import Withdrawal
from enginegate.repository.store.golden import GOLDEN_SAMPLES
from enginegate.serving import ServingOptions
from enginegate.tracking import PROMOTION_TIMEOUT_S, Tracker, deliver, engine_of, try_deliver
from enginegate.workspace import Workspace, now
from validation.live import judge_reading

UNDO = "publication"
PUBLISHED = "release"
# The live server answers one sample at a time what was validated in a batch, and another batch size
# may round differently: by a few steps of the type, relative to the largest output.
_GOLDEN_STEPS = {
    Precision.FP32: 1e-5,
    Precision.TF32: 2e-3,
    Precision.FP16: 4e-3,
    Precision.BF16: 3e-2,
    Precision.INT8: 2e-2,
    Precision.FP8: 1e-1,
}
_log = logging.getLogger("enginegate.release")


@dataclass(frozen=True, slots=True)
class Publication:
    """What is about to be published, and on whose word.

    Attributes:
        tables: where it goes.
        policy_sha256: digest of the policy for the scorecard's version of the model.
        options: how the policy has it served.
        ensemble: the steps around it; None: it is published alone.
        samples: the evaluation data, of which golden samples are taken.
        slo_p99_ms: what its latency is promised against.
    """

    tables: LiveTables
    policy_sha256: Sha256
    options: ServingOptions
    ensemble: Ensemble | None
    samples: DataSource
    slo_p99_ms: float
    workspace: Workspace
    evidence: Scorecard
    approvals: tuple[Decision, ...] = ()

    @property
    def repository(self) -> Target:
        """Everything the release goes to, with every server that answers."""
        pinned = _pinned(self.layout, self.workspace)
        return open_target(
            self.tables, self.workspace, channel="promote", pinned=pinned, judge=judge_reading
        )

    @property
    def layout(self) -> Layout:
        """The model's place in the live repository on this host."""
        return Layout(self.tables.target.repository, self.tables.model)

    @property
    def candidate(self) -> Candidate | None:
        """What the approvals name, else the winner."""
        yes = [d for d in self.approvals if d.answer == "approve"]
        return (yes[-1].candidate if yes else None) or self.evidence.winner

    @property
    def verdict(self) -> Verdict:
        """The verdict on what is to be published."""
        candidate = self.candidate
        verdict = self.evidence.verdict(candidate) if candidate else None
        if verdict is None or verdict.engine_sha256 is None:
            raise ApprovalError(f"There is nothing to publish: {self.evidence.reason}")
        return verdict

    def check_policy(self) -> None:
        """Refuse a scorecard that was made under another policy.

        Raises:
            ApprovalError: it is another model's, or the policy changed since.
        """
        evidence = self.evidence
        if self.policy_sha256 != evidence.policy_sha256:
            raise ApprovalError(
                f"Scorecard {evidence.digest[:12]} of {evidence.model} was made under another "
                f"policy than this one of {self.tables.model}. Qualify under this one: what was "
                "measured stays, and the new scorecard needs its own decision."
            )

    @property
    def published(self) -> tuple[tuple[Scorecard, Candidate], ...]:
        """What is published for each kind of device, its scorecard first; kinds without a winner
        are left out, but the first, which is what `candidate` is about."""
        first = self.candidate
        own, *others = self.evidence.by_device
        found = [(own, first)] if first is not None else []
        return (*found, *((view, view.winner) for view in others if view.winner is not None))

    def is_release(self, release: Release) -> bool:
        """Whether a release serves the very bytes, in the very way, that would be published."""
        if self.candidate is None or len(self.published) != len(release.engines):
            return False
        wanted = []
        for view, candidate in self.published:
            verdict, measured = view.verdict(candidate), view.benchmark(candidate)
            if verdict is None or measured is None:
                return False
            wanted.append((verdict.engine_sha256, measured.chosen, self.options))
        found = [(each.engine_sha256, each.serving, each.options) for each in release.engines]
        devices = self.evidence.devices and tuple(view.device for view, _ in self.published)
        return (
            found == wanted
            and (not devices or devices == release.devices)
            and self.evidence.model_uri == release.model_uri
            and composes(self.layout, release, self.ensemble)
        )

    def gives_promise(self, release: Release) -> bool:
        """Whether the live release, which serves these very bytes, was promised something else."""
        return self.layout.held_to(release).scorecard_sha256 != self.evidence.digest

    def approved_by(self, approvals: tuple[Decision, ...]) -> "Publication":
        """The same, with approvals that were checked."""
        return replace(self, approvals=approvals)


@task(task_run_name="recover", cache_policy=NO_CACHE)
def recover_interrupted(tables: LiveTables, workspace: Workspace) -> tuple[str, ...]:
    """Finish or undo what was cut short; one sentence for each operation found.

    A repository that somebody is changing, or that cannot be recovered now, is left to the next
    flow: the log says so, and this one goes on. Without a repository there is nothing to do.
    """
    if not tables.target.repository.is_dir():
        return ()
    try:
        # With object storage this may bring a new release here, by a canary's window.
        repository = open_target(tables, workspace, channel="Prefect", judge=judge_reading)
        said = repository.recover()
    except EnginegateError as error:
        _log.warning("the live repository was not searched for what was cut short: %s", error)
        return ()
    for sentence in said:
        _log.warning("%s", sentence)
    return said


@task(
    task_run_name="already-live-{publication.evidence.model}-{publication.candidate}",
    cache_policy=NO_CACHE,
)
def already_live(publication: Publication) -> Release | None:
    """The live release, if it serves the very bytes that this scorecard would publish.

    What a killed promotion left is finished or undone first.

    Raises:
        ApprovalError: the scorecard was made under another policy.
        RepositoryError: another release is live than when the evidence was made.
    """
    publication.check_policy()
    repository = publication.repository
    for sentence in repository.recover():
        _log.warning("%s", sentence)
    layout, model = publication.layout, publication.tables.model
    current = layout.current()
    if current is not None and publication.is_release(layout.release(current.version)):
        if not repository.serves(model):
            repository.bring_up(model)
        _log.info("release %d serves these very bytes: nothing to publish", current.version)
        return layout.release(current.version)
    _check_prepared(publication, current.version if current else None)
    return None


def _check_prepared(publication: Publication, live: int | None) -> None:
    evidence = publication.evidence
    if live != evidence.replaces:
        raise RepositoryError(
            f"The scorecard {evidence.digest[:12]} was made while release "
            f"{evidence.replaces or 'none'} of {evidence.model} was live; now it is "
            f"{live or 'none'}. Qualify again: what was measured stays, and the new scorecard is "
            "compared with what is live now."
        )


@task(task_run_name="renew-promise-{live.model}-{live.version}", cache_policy=NO_CACHE)
def renew_promise(publication: Publication, live: Release) -> RenewedPromise:
    """Hold the live release, which serves the very bytes that were approved, to a new promise.

    Raises:
        ApprovalError: the scorecard was not approved.
        RepositoryError: another release is live than when the evidence was made.
    """
    _check_prepared(publication, live.version)
    evidence, approvals = publication.evidence, publication.approvals
    measured = evidence.benchmark(publication.verdict.candidate)
    if not approvals or measured is None:
        raise ApprovalError(f"Scorecard {evidence.digest[:12]} was not approved, or not measured.")
    before = publication.layout.renewed(live.version)
    renewed = RenewedPromise(
        model=live.model,
        version=live.version,
        release_sha256=live.digest,
        scorecard_sha256=evidence.digest,
        promise=_promise(measured, publication.slo_p99_ms),
        promises=_further_promises(publication),
        decision=approvals[-1],
        further_decisions=approvals[:-1],
        renewed_at=now(),
        replaces=before.digest if before else None,
    )
    renewed = publication.repository.renew(renewed)
    _log.warning(
        "release %d of %s serves these very bytes already, so nothing was published; from now on "
        "the watch holds it to the promise of scorecard %s: %s",
        live.version,
        live.model,
        evidence.digest[:12],
        renewed.promise,
    )
    return renewed


@task(
    task_run_name="publish-{publication.evidence.model}-{publication.candidate}",
    cache_policy=NO_CACHE,
)
def publish(publication: Publication) -> Release:
    """Publish the approved engine; rolled back by itself if it does not prove itself."""
    package = _package(publication)
    release = publication.repository.publish(package, expected=publication.evidence.replaces)
    _log.info(
        "release %d of %s is live: %s", release.version, release.model, release.engine.candidate
    )
    return release


@publish.on_rollback
def take_back(change: Transaction) -> None:
    """Something after publishing failed: make live again what was live.

    Prefect swallows what a hook raises, so a failure here is said in our own log.
    """
    publication: Publication = change.get(UNDO)
    release: Release | None = change.get(PUBLISHED, None)
    tables, workspace = publication.tables, publication.workspace
    current = publication.layout.current()
    if release is None or current is None or current.version != release.version:
        return
    try:
        # MLflow may have the release already: the next delivery of the audit log corrects that.
        words = publication.repository.roll_back_promotion(tables.model, release.version)
    except EnginegateError:
        _log.exception("release %d was published and could not be rolled back", release.version)
        raise
    _log.warning("the promotion was rolled back. %s", words)
    update_mlflow.fn(tables, workspace)


@task(task_run_name="refuse", cache_policy=NO_CACHE)
def refuse(publication: Publication, why: str) -> None:
    """Put a promotion that nobody validly approved in the audit log."""
    deed = AuditRecord(
        event="refused",
        model=publication.tables.model,
        who=user_at_host(),
        why=why,
        origin=origin("promote"),
        scorecard=publication.evidence.digest,
    )
    record_act(publication.tables.target.repository, deed)


@task(task_run_name="move-champion-{tables.model}", cache_policy=NO_CACHE)
def move_champion(tables: LiveTables, workspace: Workspace) -> None:
    """Let the registry's alias ``champion`` stand for the version that is live, by the audit log.

    Raises:
        TrackingError: MLflow cannot be reached, or refuses: then nothing is promoted.
    """
    deliver(
        workspace,
        tables.target.repository,
        patience_s=PROMOTION_TIMEOUT_S,
        reclaim=True,
        model=tables.model,
        make_page=partial(page_of_log, rules=tables.approval),
    )


@task(task_run_name="roll-back-{tables.model}", cache_policy=NO_CACHE)
def roll_back_to(
    tables: LiveTables, workspace: Workspace, to: int | None, reason: str = ""
) -> Release:
    """Make an earlier release live again."""
    repository = open_target(tables, workspace, channel="Prefect")
    release = repository.rollback(tables.model, to, reason=reason)
    _log.info("release %d of %s is live again", release.version, release.model)
    return release


@task(task_run_name="update-mlflow", cache_policy=NO_CACHE)
def update_mlflow(tables: LiveTables, workspace: Workspace) -> None:
    """Deliver the audit log after a rollback, which stands even if MLflow cannot have it yet."""
    repository = tables.target.repository
    make_page = partial(page_of_log, rules=tables.approval)
    refusal = try_deliver(workspace, repository, model=tables.model, make_page=make_page)
    if refusal:
        _log.error(
            "MLflow does not know yet what is live in %s: %s\nThe next promotion, rollback or "
            "watch updates it.",
            repository,
            refusal,
        )


@task(task_run_name="withdraw-{tables.model}", cache_policy=NO_CACHE)
def withdraw_first(tables: LiveTables, workspace: Workspace, who: str, why: str) -> Release:
    """Leave nothing live where nothing was before the live release; what was live."""
    repository = open_target(tables, workspace, channel="Prefect")
    release = repository.withdraw(tables.model, Withdrawal(who, why))
    _log.info("release %d of %s was withdrawn; nothing is live", release.version, release.model)
    return release


def _further_promises(publication: Publication) -> dict[str, Promise]:
    measured = ((view.device, view.benchmark(winner)) for view, winner in publication.published[1:])
    return {
        device: _promise(found, publication.slo_p99_ms)
        for device, found in measured
        if found is not None
    }


def _package(publication: Publication) -> Package:
    """Everything that is published: of several kinds of device, the first with the others in it."""
    first, *others = (
        _package_of(publication, view, view.verdict(candidate))
        for view, candidate in publication.published
    )
    package = replace(first, further=tuple(others))
    steps = publication.ensemble
    return package if steps is None else as_ensemble(package, steps, _rehearsal(publication, steps))


def _package_of(publication: Publication, evidence: Scorecard, verdict: Verdict | None) -> Package:
    """What is published for one kind of device.

    Args:
        publication: what is about to be published.
        evidence: of that kind; a scorecard of one machine is its own.
        verdict: on what is published.
    """
    approvals = publication.approvals
    measured = evidence.benchmark(verdict.candidate) if verdict else None
    if not approvals or verdict is None or measured is None or measured.chosen is None:
        digest = publication.evidence.digest[:12]
        raise ApprovalError(f"Scorecard {digest} was not approved, or not measured.")
    engine, folder = _judged_engine(publication, evidence, verdict)
    served = serving(engine, folder, backend=measured.backend)
    golden = (
        _recorded_golden(publication, evidence, engine)
        if evidence.device
        else _golden(publication, engine, folder)
    )
    return Package(
        model=publication.tables.model,
        model_uri=evidence.model_uri,
        candidate=engine.candidate,
        engine_sha256=engine.file.sha256,
        approved={engine.filename: engine.file, **engine.external},
        files=dict(served.files),
        backend=served.backend,
        gpu=served.gpu,
        inputs=engine.inputs,
        outputs=engine.outputs,
        serving=measured.chosen,
        golden=golden,
        golden_max_abs_error=golden.largest * _GOLDEN_STEPS[engine.candidate.precision],
        scorecard_sha256=publication.evidence.digest,
        decision=approvals[-1],
        further_decisions=approvals[:-1],
        promise=_promise(measured, publication.slo_p99_ms),
        options=publication.options,
        settings=served.settings,
        gpu_bytes=_gpu_bytes(evidence, measured),
        cold_start_s=measured.cold_start_s,
        builder=engine.builder,
        version_compatible=engine.flags.get("version_compatible") == "true",
        device=evidence.device,
    )


def _judged_engine(
    publication: Publication, evidence: Scorecard, verdict: Verdict
) -> tuple[Engine, Path]:
    """The engine with the manifest of the kind of device that it was judged on.

    Equal bytes may have been built for another kind too, with another target and other flags.
    """
    store = PartStore(publication.workspace)
    for part in store.parts() if evidence.device else ():
        stored = part.engines.get(verdict.candidate.name)
        if stored is None or part.device != evidence.device:
            continue
        if verdict in part.evidence.verdicts and part.identity.model_uri == evidence.model_uri:
            with suppress(InputError, TamperedError):
                found = store.engine(part, verdict.candidate)
                engine, folder = found.value, found.folder
                stored.manifest.check(folder / MANIFEST)
                engine.check(folder)
                if engine.file.sha256 == verdict.engine_sha256:
                    return engine, folder
    return engine_of(publication.workspace, publication.evidence, verdict.engine_sha256 or "")


def _golden(publication: Publication, engine: Engine, folder: Path) -> Golden:
    """The engine's own answers, given now."""
    samples = load_data(publication.samples).head(GOLDEN_SAMPLES)
    inputs: Tensors = dict(samples.in_types(engine.inputs).inputs)
    with open_engine(engine, folder) as runner:
        return Golden(inputs, runner.run(inputs))


def _recorded_golden(publication: Publication, evidence: Scorecard, engine: Engine) -> Golden:
    """The answers that the engine gave where it was judged: no such device need be here.

    Raises:
        InputError: they are not here.
        TamperedError: they are not those that the scorecard names.
    """
    store = PartStore(publication.workspace)
    digest = evidence.golden.get(engine.candidate.name)
    path = store.golden_file(digest) if digest else None
    if digest is None or path is None or not path.is_file():
        raise InputError(
            f"The golden answers of {engine.candidate} on {evidence.device} are not in "
            f"{publication.workspace.root}. Promote where the scorecard was made, or bring them "
            "with `enginegate evidence import`."
        )
    digest.check(path)
    return Golden.read(path)


def _gpu_bytes(evidence: Scorecard, measured: Benchmark) -> int | None:
    """GPU memory that the winner takes of one GPU, as it was served; else by the engine alone.

    The server's own figure has what the serving stack adds. Where it was not read, each instance
    of each process is taken to need what the engine alone did at its largest batch.
    """
    speed = evidence.engine_speed(measured.candidate)
    if measured.gpu_bytes is not None or measured.chosen is None or speed is None:
        return measured.gpu_bytes
    if speed.largest_batch_mib is None:
        return None
    copies = measured.chosen.instances * measured.chosen.processes
    return round(speed.largest_batch_mib * copies * (1 << 20))


def _rehearsal(publication: Publication, steps: Ensemble) -> Callable[[Composed], Golden]:
    """Record an ensemble's answers: its composing models on a server that is started for it."""
    samples = load_data(steps.samples or publication.samples).head(GOLDEN_SAMPLES)
    return partial(
        record_golden_on_own_server,
        given=dict(samples.inputs),
        workspace=publication.workspace,
        load_timeout_s=publication.tables.target.load_timeout_s,
    )


def _pinned(layout: Layout, workspace: Workspace) -> frozenset[int] | None:
    """Releases whose model version an alias stands for; None when MLflow cannot say."""
    tracker = Tracker(workspace.tracking_uri, workspace.artifacts)
    releases = layout.releases()
    sources = [(each.version, registered_version(each.model_uri)) for each in releases]
    found = [(version, *source) for version, source in sources if source]
    try:
        tracker.check_answers()
        aliased = {name: tracker.aliased(name) for name in {name for _, name, _ in found}}
    except TrackingError as error:
        _log.warning("MLflow cannot say what aliases stand for, so no old release goes: %s", error)
        return None
    return frozenset(version for version, name, number in found if number in aliased[name])


def _promise(measured: Benchmark, slo_p99_ms: float) -> Promise:
    p99, run = measured.p99_at_slo, measured.at_slo
    median = run.percentile(0.5) if run else None
    stages = run.stages if run else None
    return Promise(
        p99_ms=p99.value_ms if p99 else 0.0,
        throughput_per_s=measured.throughput_at_slo_per_s,
        slo_p99_ms=slo_p99_ms,
        p50_ms=median.value_ms if median else None,
        server_ms=stages.server_ms if stages else None,
    )
