"""The Python API: qualify, promote, roll back, and see what is live, from a program of your own.

Each function does what the verb of its name does, and returns the record that the verb prints with
``--json``. Nothing is printed; progress is logged to the logger ``enginegate``. What cannot be
found out is raised (`EnginegateError`); a candidate that is not good enough is in the record.
"""

import os
from pathlib import Path
from typing import TypeAlias

from rich.console import Console

from enginegate.api.own_model import OwnModel
from enginegate.cli.live.release import promote_live, roll_back_live
from enginegate.cli.live.status import status_of
from enginegate.cli.output.records import ReleaseDocument, ScorecardDocument, StatusDocument
from enginegate.cli.output.scorecard_document import scorecard_document
from enginegate.cli.policies import policies_of
from enginegate.errors import (
    ApprovalError,
    EnginegateError,
    InputError,
    PolicyError,
    RepositoryError,
    ServerError,
)
from enginegate.evidence import Scorecard
from enginegate.pipeline import pipeline_module
from enginegate.policy import read_policy

__all__ = [
    "ApprovalError",
    "EnginegateError",
    "InputError",
    "PolicyError",
    "ReleaseDocument",
    "RepositoryError",
    "ScorecardDocument",
    "ServerError",
    "StatusDocument",
    "promote",
    "qualify",
    "rollback",
    "status",
]
PathLike: TypeAlias = str | os.PathLike[str]


def qualify(  # noqa: PLR0913 - one argument for each thing that a person knows
    policy: PathLike | None = None,
    *,
    model: PathLike | None = None,
    data: PathLike | None = None,
    p99_ms: float | None = None,
    min_throughput_per_s: float | None = None,
    task: str | None = None,
    name: str | None = None,
    calibration: PathLike | None = None,
    allow_pickle: bool = False,
    allow_code: bool = False,
) -> ScorecardDocument:
    """Build, judge and benchmark every candidate of one model version. Needs no person.

    Either a policy file is named, or model, data and SLO: these become ``policies/NAME.toml``, as
    ``enginegate init`` writes it. Everything is remembered by content: a second call with the same
    model, data, policy and versions builds and measures nothing.

    Args:
        policy: the model family's policy file.
        model: with a policy another version than the policy's, e.g. ``models:/digits/2``; without
            one a file, a folder or an address.
        data: labelled samples that training never saw.
        p99_ms: 99th percentile of latency at the client that serving must keep.
        min_throughput_per_s: requests a second that traffic needs.
        task: what the outputs mean; None: found out from model and data.
        name: in the live repository; None: after the model.
        calibration: other samples, for int8 scales; None: some of the data are set aside.
        allow_pickle: load a model that can run code when opened.
        allow_code: import and run Python of the model's source.

    Returns:
        The scorecard: ``winner`` is None where nothing can be approved, and each of ``candidates``
        has its findings.

    Raises:
        InputError: what is given is not enough, too much, or says something else than a policy that
            is there.
        PolicyError: the policy is not valid, or names what is not there; nothing was started.
        ModelError: the model cannot be opened or exported.
        DataError: evaluation or calibration data is missing, malformed or does not fit.
        ServerError: there is no Triton to benchmark with.
        TrackingError: MLflow cannot be reached.
    """
    own = (data, p99_ms, min_throughput_per_s)
    if policy is not None:
        if any((*own, task, name, calibration, allow_pickle, allow_code)):
            raise InputError(
                "qualify() got a policy and, beside it, what that file says. Change the file, or "
                "leave the policy out."
            )
        path, version = Path(policy), None if model is None else str(model)
        rules = read_policy(path)  # a mistake in it is shown before Prefect is started
        if version is not None:
            rules.with_model(version)
        return _qualified(path, version)
    if model is None or data is None or p99_ms is None or min_throughput_per_s is None:
        raise InputError(
            "qualify() needs a policy file, or all of model, data, p99_ms and min_throughput_per_s."
        )
    given = OwnModel(
        model=os.fspath(model),
        data=os.fspath(data),
        p99_ms=p99_ms,
        min_throughput_per_s=min_throughput_per_s,
        task=task,
        name=name,
        calibration=None if calibration is None else os.fspath(calibration),
        allow_pickle=allow_pickle,
        allow_code=allow_code,
    )
    return _qualified(given.policy(), None)


def _qualified(policy: Path, version: str | None) -> ScorecardDocument:
    scorecard: Scorecard = pipeline_module("flows.qualify").qualify(policy, version)
    return scorecard_document(scorecard, policy=policy)


def promote(policy: PathLike, scorecard: str) -> ReleaseDocument:
    """Publish the winner of a scorecard that a person approved; it is proved live.

    Nothing here approves: ``enginegate approve`` or a form in Prefect does, in a person's name.

    Args:
        policy: the model family's policy file.
        scorecard: digest, or its beginning.

    Raises:
        ApprovalError: nobody approved exactly this scorecard, or no longer validly.
        TamperedError: the scorecard is not what its qualification found.
        RepositoryError: another release is live than when the evidence was made.
        PublishError: the release did not prove itself; what was live is live.
    """
    return promote_live(Path(policy), scorecard, _silent())


def rollback(policy: PathLike, *, to: int | None = None, reason: str = "") -> ReleaseDocument:
    """Make an earlier release live again, proved like a promotion.

    Args:
        policy: the model family's policy file.
        to: release number; None: the one before.
        reason: why; kept in the audit log.

    Raises:
        RollbackTargetError: there is no such release, or it is live already.
        RepositoryError: there is none to go back to, or the live repository cannot be changed.
        ServerError: the server does not load the release; what was live is live.
    """
    return roll_back_live(Path(policy), to, reason, _silent())


def status(*policies: PathLike) -> StatusDocument:
    """What is live of each policy's model, and what waits for a person.

    Args:
        policies: policy files; none: those in ``policies/`` of the current folder's project.

    Returns:
        ``models``, one a policy, and ``errors``: why policies or scorecards cannot be read.

    Raises:
        InputError: no policy was named, and there is none here.
    """
    return status_of(policies_of([Path(each) for each in policies])).document


def _silent() -> Console:
    return Console(quiet=True)
