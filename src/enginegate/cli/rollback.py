"""Changing what is live without a promotion: roll back, withdraw, pull from object storage."""

import os
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console

from enginegate.cli.checkout import of_checkout
from enginegate.cli.policies import PolicyFile
from enginegate.cli.terminal import plain
from enginegate.decision import Release
from enginegate.errors import InputError, PolicyError
from enginegate.policy import read_policy
from enginegate.report import page_of_log
from enginegate.repository import open_target
from enginegate.repository.recovery import Withdrawal
from enginegate.tracking import try_deliver
from enginegate.workspace import Workspace

_ANSWER_S = 2.0
_SHORTEST_REASON = 5


def roll_back_live(policy: Path, to: int | None, reason: str, out: Console) -> None:
    """Make an earlier release live, as a flow where Prefect's server answers, else right here.

    Raises:
        InputError: ``to`` is no release number.
    """
    if to is not None and to < 1:
        raise InputError(f"--to {to} is no release number: they begin at 1.")
    if prefect_answers() and Path("flows/rollback.py").is_file():
        release: Release = of_checkout("flows.rollback").rollback(policy, to, reason)
        _print_live(release, out)
        return
    rules = read_policy(policy)
    workspace = Workspace.of(rules)
    repository = open_target(rules.live_tables, workspace, channel="command")
    release = repository.rollback(rules.name, to, reason=reason)
    _print_live(release, out)
    refusal = try_deliver(workspace, rules.target.repository, page_of_log)
    _print_undelivered(refusal, out)


def withdraw_live(policy: Path, who: str, reason: str, out: Console) -> None:
    """Leave nothing live, as a flow where Prefect's server answers, else right here.

    Raises:
        InputError: no name or no reason.
        RepositoryError: nothing is live, or there is a release to roll back to.
    """
    if not who.strip() or len(reason.strip()) < _SHORTEST_REASON:
        raise InputError(
            f"A withdrawal needs a name and a reason (at least {_SHORTEST_REASON} characters); "
            f"given were {who!r} and {reason!r}."
        )
    if prefect_answers() and Path("flows/withdraw.py").is_file():
        release: Release = of_checkout("flows.withdraw").withdraw(policy, reason, who)
        _print_withdrawn(release, policy, out)
        return
    rules = read_policy(policy)
    workspace = Workspace.of(rules)
    repository = open_target(rules.live_tables, workspace, channel="command")
    release = repository.withdraw(rules.name, Withdrawal(who, reason))
    _print_withdrawn(release, policy, out)
    refusal = try_deliver(workspace, rules.target.repository, page_of_log)
    _print_undelivered(refusal, out)


def prefect_answers() -> bool:
    """Whether a Prefect server is named and answers within two seconds."""
    url = os.environ.get("PREFECT_API_URL", "").rstrip("/")
    if urlsplit(url).scheme not in {"http", "https"}:
        return False
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=_ANSWER_S) as answer:  # noqa: S310 - checked above
            return bool(answer.status == 200)  # noqa: PLR2004
    except (OSError, urllib.error.URLError, ValueError):
        return False


def _print_undelivered(refusal: str, out: Console) -> None:
    if os.environ.get("PREFECT_API_URL"):
        out.print("Prefect does not know yet; the next promotion, rollback or watch updates it.")
    if refusal:
        out.print("MLflow does not know yet; the next promotion, rollback or watch updates it:")
        out.print(f"  {refusal}", markup=False)


def _print_withdrawn(release: Release, policy: Path, out: Console) -> None:
    named = f"Release {release.version} of {release.model} ({release.engine.candidate})"
    out.print(f"{named} was withdrawn. Nothing is live.", markup=False)
    out.print(f"Next: enginegate qualify {policy}; a promotion starts anew.", markup=False)


def _print_live(release: Release, out: Console) -> None:
    out.print(
        f"Release {release.version} of {release.model} is live again: {release.engine.candidate}."
    )


def pull_command(policy: PolicyFile) -> None:
    """Bring this host to what is live in object storage: fetch, check, load, prove."""
    rules = read_policy(policy)
    storage = open_target(rules.live_tables, Workspace.of(rules), channel="command").storage
    if storage is None:
        raise PolicyError(f"{policy} names no target.objects, so there is nothing to pull.")
    release = storage.pull()
    where = storage.store.url
    if release is None:
        plain.print(f"Nothing of {rules.name} is live in {where}.", soft_wrap=True)
    else:
        sentence = f"Release {release.version} of {rules.name} is live here, as in {where}."
        plain.print(sentence, soft_wrap=True)
