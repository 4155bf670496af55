"""What a run is called on Prefect's pages: the flow, then model, version and candidate.

Prefect asks before the flow begins, and again when a suspended run is resumed or a failed one is
retried, so a name is made of the run's parameters and of files of this host alone. Where they do
not say it all, the name says less: a policy that cannot be read is the flow's own error to raise.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prefect.runtime import flow_run

from enginegate.candidate import Candidate
from enginegate.decision import Release
from enginegate.evidence import Scorecard
from enginegate.policy import Policy, read_policy
from enginegate.repository import Layout
from enginegate.workspace import Workspace
from tasks.run_page import model_version

_log = logging.getLogger("enginegate.names")


def qualification_title(model: str, uri: str) -> str:
    """The name of a run that qualifies one version of a model."""
    return f"qualify {model_version(model, uri)}"


def promotion_title(scorecard: Scorecard, candidate: Candidate | None = None) -> str:
    """The name of a run that may publish what a scorecard is about."""
    chosen = candidate or scorecard.winner
    named = f"promote {model_version(scorecard.model, scorecard.model_uri)}"
    return f"{named} {chosen}" if chosen else named


def _named(flow: str, title: Callable[[Policy, Mapping[str, Any]], str]) -> str:
    given = flow_run.parameters
    try:
        policy = given["policy"]
        opened = policy if isinstance(policy, Policy) else read_policy(Path(policy))
        return title(opened, given)
    except Exception as error:  # noqa: BLE001  # a name must not be what a flow fails of
        _log.debug("the run is named %s alone: %s", flow, error)
        return flow


def qualification_name() -> str:
    """Of a run of ``qualify``, before an alias was resolved."""
    return _named(
        "qualify",
        lambda p, given: qualification_title(p.name, given.get("model_uri") or p.model.uri),
    )


def device_run_name() -> str:
    """Of a run of ``qualify-device``, before an alias was resolved."""
    return _named(
        "qualify-device",
        lambda p, given: (
            f"{qualification_title(p.name, given.get('model_uri') or p.model.uri)} "
            f"on {given['device']}"
        ),
    )


def benchmark_name() -> str:
    """Of a run of ``benchmark``."""
    return _named("benchmark", lambda p, _: f"benchmark {model_version(p.name, p.model.uri)}")


def promotion_name() -> str:
    """Of a run of ``promote``; a scorecard that is not here yet is named by its digest."""
    return _named("promote", _promotion)


def _promotion(policy: Policy, given: Mapping[str, Any]) -> str:
    digest = str(given["scorecard"])
    try:
        return promotion_title(Workspace.of(policy).scorecard(digest))
    except Exception:  # noqa: BLE001  # it may be in MLflow only
        return f"promote {policy.name} scorecard {digest[:12]}"


def watch_name() -> str:
    """Of a run of ``watch``."""
    return _named("watch", lambda p, _: f"watch {_live(p)}")


def rollback_name() -> str:
    """Of a run of ``rollback``."""
    return _named("rollback", _rollback)


def _rollback(policy: Policy, given: Mapping[str, Any]) -> str:
    layout = Layout(policy.target.repository, policy.name)
    to, current = given.get("to"), layout.current()
    if to is None and current is not None:
        to = layout.release(current.version).previous_version
    target = _release_words(layout.release(to)) if to else "the release before"
    return f"rollback {policy.name} to {target}"


def withdrawal_name() -> str:
    """Of a run of ``withdraw``."""
    return _named("withdraw", lambda p, _: f"withdraw {_live(p)}")


def scan_name() -> str:
    """Of a run of ``scan``."""
    return _named("scan", lambda p, _: f"scan {p.name}")


def _live(policy: Policy) -> str:
    layout = Layout(policy.target.repository, policy.name)
    current = layout.current()
    if current is None:
        return f"{policy.name}, nothing live"
    return f"{policy.name} {_release_words(layout.release(current.version))}"


def _release_words(release: Release) -> str:
    candidates = ", ".join(engine.candidate.name for engine in release.engines)
    version = model_version("", release.model_uri).strip()
    return f"release {release.version} ({version} {candidates})"
