"""Going back on the terminal: with nothing but the folder and the server, if need be."""

import os
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console

from enginegate.cli.checkout import of_checkout
from enginegate.decision import Release
from enginegate.errors import InputError
from enginegate.ledger import Outbox, live_message
from enginegate.policy import read_policy
from enginegate.repository import open_repository
from enginegate.workspace import Workspace

_ANSWER_S = 2.0


def roll_back(policy: Path, to: int | None, reason: str, out: Console) -> None:
    """Make an earlier release live, as a flow where Prefect's server answers, else right here.

    Raises:
        InputError: ``to`` is no release number.
    """
    if to is not None and to < 1:
        raise InputError(f"--to {to} is no release number: they begin at 1.")
    if prefect_answers() and Path("flows/rollback.py").is_file():
        release: Release = of_checkout("flows.rollback").rollback(policy, to, reason)
        _say(release, out)
        return
    rules = read_policy(policy)
    workspace = Workspace.of(rules)
    repository, outbox = open_repository(rules, workspace, way="command"), Outbox(workspace)
    with outbox.expecting(rules.target.repository, rules.name):
        release = repository.rollback(rules.name, to, reason=reason)
    _say(release, out)
    message = live_message(release, rules.target.repository)
    refusal = outbox.tell_or_keep(message) if message else ""
    outbox.told(rules.name)
    if os.environ.get("PREFECT_API_URL"):
        out.print("Prefect could not be told yet; the next promotion, rollback or watch tells it.")
    if refusal:
        out.print("MLflow could not be told yet; the next promotion, rollback or watch tells it:")
        out.print(f"  {refusal}", markup=False)


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


def _say(release: Release, out: Console) -> None:
    out.print(f"Release {release.version} of {release.model} is live again: {release.candidate}.")
