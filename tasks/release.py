"""Publishing a release, taking it back, and telling the ledger."""

import logging
from dataclasses import dataclass, replace

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.transactions import Transaction

from enginegate.candidate import Precision
from enginegate.data import Tensors, read_data
from enginegate.decision import Decision, Promise, Release
from enginegate.engines import open_engine, serving
from enginegate.errors import ApprovalError, EnginegateError, LedgerError, RepositoryError
from enginegate.evidence import Benchmark, Scorecard, Verdict
from enginegate.ledger import Ledger
from enginegate.policy import Policy
from enginegate.repository import Golden, Layout, LiveRepository, Package
from enginegate.triton.live import live_client
from enginegate.workspace import Workspace

UNDO = "publication"
PUBLISHED = "release"
CHAMPION = "champion"
_GOLDEN_SAMPLES = 16
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
    """What is about to be published, and on whose word."""

    rules: Policy
    evidence: Scorecard
    decision: Decision | None = None

    @property
    def repository(self) -> LiveRepository:
        """The live repository, with its server if one answers."""
        target = self.rules.target
        return LiveRepository(
            root=target.repository,
            client=live_client(target),
            load_timeout_s=target.load_timeout_s,
            keep=self.rules.retention.releases,
        )

    @property
    def verdict(self) -> Verdict:
        """The winner's verdict."""
        verdict = self.evidence.verdict(self.evidence.winner) if self.evidence.winner else None
        if verdict is None or verdict.engine_sha256 is None:
            raise ApprovalError(f"There is nothing to publish: {self.evidence.reason}")
        return verdict

    def check_policy(self) -> None:
        """Refuse a scorecard that was made under other rules.

        Raises:
            ApprovalError: it is another model's, or the policy changed since.
        """
        evidence = self.evidence
        if self.rules.with_model(evidence.model_uri).digest != evidence.policy_sha256:
            raise ApprovalError(
                f"Scorecard {evidence.digest[:12]} of {evidence.model} was made under other rules "
                f"than this policy of {self.rules.name} has. Qualify under this one: what was "
                "measured stays, and the new scorecard needs its own decision."
            )

    def is_release(self, release: Release) -> bool:
        """Whether a release serves the very bytes, in the very way, that would be published."""
        measured = self.evidence.benchmark(self.verdict.candidate)
        wanted = (self.verdict.engine_sha256, self.evidence.model_uri)
        same_bytes = (release.engine_sha256, release.model_uri) == wanted
        return same_bytes and measured is not None and release.serving == measured.chosen

    def approved_by(self, decision: Decision) -> "Publication":
        """The same, with a decision that was checked."""
        return replace(self, decision=decision)


@task(task_run_name="already-live", cache_policy=NO_CACHE)
def already_live(publication: Publication) -> Release | None:
    """The live release, if it serves the very bytes that this scorecard would publish.

    What a killed promotion left is finished or undone first.

    Raises:
        ApprovalError: the scorecard was made under another policy.
        RepositoryError: another release is live than when the evidence was made.
    """
    rules, evidence = publication.rules, publication.evidence
    publication.check_policy()
    repository = publication.repository
    for sentence in repository.recover():
        _log.warning("%s", sentence)
    layout = Layout(rules.target.repository, rules.name)
    current = layout.current()
    if current is not None and publication.is_release(layout.release(current.version)):
        if not repository.serves(rules.name):
            repository.bring_up(rules.name)
        _log.info("release %d serves these very bytes: nothing to publish", current.version)
        return layout.release(current.version)
    live = current.version if current else None
    if live != evidence.replaces:
        raise RepositoryError(
            f"The scorecard {evidence.digest[:12]} was made while release "
            f"{evidence.replaces or 'none'} of {rules.name} was live; now it is {live or 'none'}. "
            "Qualify again: what was measured stays, and the new scorecard is compared with what "
            "is live now."
        )
    return None


@task(task_run_name="publish", cache_policy=NO_CACHE)
def publish(publication: Publication) -> Release:
    """Publish the approved engine; undone by itself if it does not prove itself."""
    release = publication.repository.publish(
        _package(publication), expected=publication.evidence.replaces
    )
    _log.info("release %d of %s is live: %s", release.version, release.model, release.candidate)
    return release


@publish.on_rollback
def take_back(change: Transaction) -> None:
    """Something after publishing failed: make live again what was live.

    Prefect swallows what a hook raises, so a failure here is said in our own log.
    """
    publication: Publication = change.get(UNDO)
    release: Release | None = change.get(PUBLISHED, None)
    current = Layout(publication.rules.target.repository, publication.rules.name).current()
    if release is None or current is None or current.version != release.version:
        return
    try:
        words = publication.repository.withdraw(release.model, release.version)
    except EnginegateError:
        _log.exception("release %d was published and could not be taken back", release.version)
        raise
    _log.warning("the promotion was undone. %s", words)


@task(task_run_name="move-champion", cache_policy=NO_CACHE)
def move_champion(release: Release) -> None:
    """Let the registry's alias ``champion`` stand for the version that is live."""
    _champion(release)


@task(task_run_name="roll-back", cache_policy=NO_CACHE)
def go_back(rules: Policy, to: int | None) -> Release:
    """Make an earlier release live again."""
    target = rules.target
    repository = LiveRepository(
        root=target.repository,
        client=live_client(target),
        load_timeout_s=target.load_timeout_s,
        keep=rules.retention.releases,
    )
    release = repository.rollback(rules.name, to)
    _log.info("release %d of %s is live again", release.version, release.model)
    return release


@task(task_run_name="follow-with-champion", cache_policy=NO_CACHE)
def follow_with_champion(release: Release) -> None:
    """Move the alias after a rollback, which stands even if MLflow cannot be told."""
    try:
        _champion(release)
    except LedgerError as error:
        _log.error(
            "Release %d is live, but MLflow could not be told: %s\nRun the same rollback later, or "
            "set the alias %r to %s yourself.",
            release.version,
            error,
            CHAMPION,
            release.model_uri,
        )


def _champion(release: Release) -> None:
    if not release.model_uri.startswith("models:/"):
        _log.info(
            "%s is not in the model registry, so no alias %r stands for it",
            release.model_uri,
            CHAMPION,
        )
        return
    workspace = Workspace.here()
    ledger = Ledger(workspace.tracking_uri, workspace.artifacts)
    name, version = release.model_uri.removeprefix("models:/").split("/")
    facts = {"enginegate.release": str(release.version), "enginegate.engine": release.engine_sha256}
    ledger.tag_version(name, int(version), facts)
    ledger.move_alias(name, CHAMPION, int(version))
    _log.info("%s@%s is version %s", name, CHAMPION, version)


def _package(publication: Publication) -> Package:
    evidence, decision = publication.evidence, publication.decision
    measured = evidence.benchmark(publication.verdict.candidate)
    if decision is None or measured is None or measured.chosen is None:
        raise ApprovalError(f"Scorecard {evidence.digest[:12]} was not approved, or not measured.")
    engine, folder = Workspace.here().engine(publication.verdict.engine_sha256 or "")
    served = serving(engine, folder)
    samples = read_data(publication.rules.data.evaluation).head(_GOLDEN_SAMPLES)
    with open_engine(engine, folder) as runner:
        inputs: Tensors = dict(samples.inputs)
        golden = Golden(inputs, runner.run(inputs))
    return Package(
        model=publication.rules.name,
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
        scorecard_sha256=evidence.digest,
        decision=decision,
        promise=_promise(measured, publication.rules),
    )


def _promise(measured: Benchmark, rules: Policy) -> Promise:
    p99 = measured.p99_at_slo
    return Promise(
        p99_ms=p99.value_ms if p99 else 0.0,
        throughput_per_s=measured.throughput_at_slo_per_s,
        slo_p99_ms=rules.slo.p99_ms,
    )
