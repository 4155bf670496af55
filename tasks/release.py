"""Publishing a release, taking it back, and telling the ledger."""

import logging
from dataclasses import dataclass, replace

import numpy as np
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.transactions import Transaction

from enginegate.candidate import Engine
from enginegate.data import read_data
from enginegate.decision import Decision, Promise, Release
from enginegate.engines import open_engine, serving
from enginegate.errors import ApprovalError, LedgerError, RepositoryError
from enginegate.evidence import Benchmark, Scorecard
from enginegate.ledger import Ledger
from enginegate.policy import Policy
from enginegate.repository import Golden, Layout, LiveRepository, Package
from enginegate.triton.live import live_client
from enginegate.workspace import Workspace

UNDO = "publication"
_GOLDEN_SAMPLES = 16
_log = logging.getLogger("enginegate.release")


@dataclass(frozen=True, slots=True)
class Publication:
    """What is about to be published, and on whose word."""

    rules: Policy
    evidence: Scorecard
    decision: Decision | None = None

    def approved_by(self, decision: Decision) -> "Publication":
        """The same, with a decision that was checked."""
        return replace(self, decision=decision)


def live_repository(rules: Policy) -> LiveRepository:
    """The repository of a policy and the server that serves from it, if one answers."""
    return LiveRepository(
        root=rules.target.repository,
        client=live_client(rules.target),
        load_timeout_s=rules.target.load_timeout_s,
        keep=rules.retention.releases,
    )


def already_live(rules: Policy, evidence: Scorecard) -> Release | None:
    """The live release, if it serves the very bytes that this scorecard would publish."""
    layout = Layout(rules.target.repository, rules.name)
    current = layout.current()
    verdict = evidence.verdict(evidence.winner) if evidence.winner else None
    if current is None or verdict is None:
        return None
    release = layout.release(current.version)
    same = (release.engine_sha256, release.model_uri) == (verdict.engine_sha256, evidence.model_uri)
    if same:
        _log.info(
            "release %d already serves %s: nothing to publish", release.version, evidence.model_uri
        )
    return release if same else None
