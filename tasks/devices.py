"""Parts of a qualification: one for each kind of device, made where such a device is.

A part is kept by content, so one that is there is not made again. What a run that died had
finished is not done again either.
"""

import logging
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from enginegate.candidate import Engine, FileDigest, Unbuilt
from enginegate.content_store import ContentFolder
from enginegate.data_sources import load_data
from enginegate.devices import (
    DeviceQualification,
    PartIdentity,
    PartStore,
    StoredEngine,
    known_part,
    push_part,
    stored_engine,
)
from enginegate.engines import open_engine
from enginegate.engines.cuda import gpu
from enginegate.errors import EnginegateError
from enginegate.evidence import DeviceEvidence, Outcome, Scorecard
from enginegate.machine import processor, user_at_host
from enginegate.object_storage import ObjectStore
from enginegate.policy.data import DataSource
from enginegate.policy.devices import DeviceKind
from enginegate.repository.store.golden import GOLDEN_SAMPLES, Golden
from enginegate.workspace import Workspace, now

_log = logging.getLogger("enginegate.devices")


@task(task_run_name="check-device-{name}", cache_policy=NO_CACHE)
def check_device(name: str, kind: DeviceKind) -> None:
    """Refuse a machine that has no such device: what it measured would be another kind's.

    Raises:
        EnginegateError: the GPU that is used here has not the name that the policy says.
    """
    here = gpu()
    if not kind.gpu or (here is not None and _is_named(here.name, kind.gpu)):
        return
    found = here.name if here is not None else f"none (a processor: {processor()})"
    raise EnginegateError(
        f"The policy's device {name!r} has a GPU named {kind.gpu!r}, and the GPU that is used on "
        f"this machine, the first that CUDA shows, is: {found}. Run it on a worker of the pool "
        f"{kind.pool or name!r}, choose another GPU with CUDA_VISIBLE_DEVICES, or correct "
        f"devices.{name} in the policy."
    )


def _is_named(name: str, wanted: str) -> bool:
    """Whether whole words of a GPU's name are those wanted: an A100 is no A10."""
    words = rf"(?<![0-9a-z]){re.escape(wanted.strip().casefold())}(?![0-9a-z])"
    return re.search(words, name.casefold()) is not None


@task(task_run_name="find-part-{identity.device}", cache_policy=NO_CACHE)
def find_part(
    identity: PartIdentity, workspace: Workspace, store: str | None = None
) -> DeviceQualification | None:
    """The part of that identity if somebody made it, and nothing of it broke.

    Args:
        identity: of the part.
        workspace: looked in first.
        store: URL of the object storage that workers leave it in; None: they share the workspace.
    """
    part = known_part(identity, workspace, ObjectStore(store) if store is not None else None)
    if part is not None:
        when = f"{part.made_at:%Y-%m-%d %H:%M}"
        _log.info("%s: qualified at %s by %s", part.device, when, part.made_by)
    return part


@task(task_run_name="push-part-{part.identity.device}", cache_policy=NO_CACHE)
def push_to_store(part: DeviceQualification, workspace: Workspace, store: str) -> None:
    """Leave a part, engines included, in the object storage that the qualification reads."""
    push_part(part, workspace, ObjectStore(store))
    _log.info("%s: its part is in %s", part.device, store)


@task(task_run_name="keep-part-{identity.device}", cache_policy=NO_CACHE)
def keep_part(
    identity: PartIdentity,
    card: Scorecard,
    attempts: Sequence[ContentFolder[Engine] | Unbuilt],
    results: Sequence[Mapping[str, str]],
    evaluation: DataSource,
    workspace: Workspace,
) -> DeviceQualification:
    """Keep what was found out on this machine, with golden answers of what may be published.

    Args:
        identity: of the part.
        card: the evidence.
        attempts: the engines that it is about, in its order.
        results: Great Expectations' results of each by name.
        evaluation: samples that golden answers are given to.
        workspace: keeps the part.
    """
    parts, golden = PartStore(workspace), {}
    for attempt in attempts:
        if not isinstance(attempt, Unbuilt) and _may_be_published(card, attempt.value):
            golden[attempt.value.candidate.name] = _golden(attempt, evaluation, parts)
    own = {name: getattr(card, name) for name in DeviceEvidence.model_fields}
    made = DeviceQualification(
        identity=identity,
        data=card.data,
        evidence=DeviceEvidence(**{**own, "device": identity.device, "golden": golden}),
        engines=_stored(attempts),
        unbuilt=tuple(each for each in attempts if isinstance(each, Unbuilt)),
        results={
            verdict.candidate.name: dict(found)
            for verdict, found in zip(card.verdicts, results, strict=True)
        },
        made_at=now(),
        made_by=user_at_host(),
    )
    path = parts.save(made)
    _log.info("%s: %s", identity.device, card.reason)
    _log.info("its part of the qualification: %s", path)
    return made


def _stored(attempts: Sequence[ContentFolder[Engine] | Unbuilt]) -> dict[str, StoredEngine]:
    built = (attempt for attempt in attempts if not isinstance(attempt, Unbuilt))
    return {each.value.candidate.name: stored_engine(each) for each in built}


def _may_be_published(card: Scorecard, engine: Engine) -> bool:
    measured = card.benchmark(engine.candidate)
    passed = card.outcome(engine.candidate) is Outcome.PASSED
    return passed and measured is not None and measured.chosen is not None


def _golden(built: ContentFolder[Engine], evaluation: DataSource, parts: PartStore) -> FileDigest:
    """The engine's answers on this device, kept by their digest."""
    samples = load_data(evaluation).head(GOLDEN_SAMPLES)
    inputs = dict(samples.in_types(built.value.inputs).inputs)
    with open_engine(built.value, built.folder) as runner:
        answers = runner.run(inputs)
    with tempfile.TemporaryDirectory(prefix="enginegate-golden-") as folder:
        written = Path(folder) / "golden.npz"
        Golden(inputs, answers).write(written)
        digest = FileDigest.of(written)
    path = parts.golden_file(digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    Golden(inputs, answers).write(path)
    digest.check(path)
    return digest


def all_made(ended: Mapping[str, object]) -> list[DeviceQualification]:
    """The part of every kind of device, once all have ended.

    Args:
        ended: by kind of device: its part, or what was raised.

    Raises:
        EnginegateError: some have none; names each, and why.
    """
    made = [each for each in ended.values() if isinstance(each, DeviceQualification)]
    failed = {n: e for n, e in ended.items() if not isinstance(e, DeviceQualification)}
    for error in failed.values():
        if not isinstance(error, EnginegateError):
            raise error if isinstance(error, BaseException) else TypeError(str(error))
    if failed:
        lines = "\n".join(f"  {name}: {error}" for name, error in failed.items())
        kept = f" {', '.join(each.device for each in made)} is done and kept." if made else ""
        raise EnginegateError(f"Not every kind of device was qualified.{kept}\n{lines}")
    return made
