"""Changing what is live: promote, roll back, withdraw, pull from object storage."""

import os
import time
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.text import Text

from enginegate.cli.output.json_output import JsonFlag, Printer, printing
from enginegate.cli.output.records import ReleaseDocument
from enginegate.cli.policies import PolicyFile
from enginegate.decision import Promise, Release
from enginegate.errors import EnginegateError, InputError, PolicyError
from enginegate.pipeline import pipeline_module
from enginegate.policy import Policy, read_policy
from enginegate.report import page_of_log
from enginegate.report.tables import print_hanging
from enginegate.repository import Layout, StoredTarget, open_target
from enginegate.repository.recovery import Withdrawal
from enginegate.tracking import try_deliver
from enginegate.workspace import Workspace

_ANSWER_S = 2.0
_SHORTEST_REASON = 5


def promote_live(policy: Path, scorecard: str, out: Console) -> ReleaseDocument:
    """Publish the approved winner of a scorecard, as a flow; it is proved live.

    Args:
        policy: the model family's policy file.
        scorecard: digest, or its beginning.
        out: where it is said what was done.

    Raises:
        PolicyError: the policy is not valid; nothing was started.
        ApprovalError: nobody approved exactly this scorecard, or no longer validly.
        RepositoryError: another release is live than when the evidence was made.
        PublishError: the release did not prove itself; what was live is live.
    """
    target = read_policy(policy).target  # a mistake in it is shown before Prefect is started
    release: Release = pipeline_module("flows.promote").promote(policy, scorecard)
    named = f"Release {release.version} of {release.model}"
    held = Layout(target.repository, release.model).held_to(release)
    own = held.scorecard_sha256 == release.scorecard_sha256
    if own:
        print_hanging(out, f"{named} is live: {release.engine.candidate}.")
    else:
        print_hanging(out, f"{named} serves these very bytes already, so nothing was published.")
        print_hanging(
            out,
            f"From now on the watch holds it to the promise of scorecard "
            f"{held.scorecard_sha256[:12]}: {held.promise}.",
        )
    first = release.previous_version is None
    back = f"withdraw {policy} --reason WHY" if first else f"rollback {policy}"
    for line in (f"Next: enginegate status {policy}", f"back: enginegate {back}"):
        out.print(line, markup=False, soft_wrap=True)
    return ReleaseDocument(
        action="published" if own else "promised",
        model=release.model,
        live=True,
        release=release,
        promise=held.promise,
    )


def roll_back_live(policy: Path, to: int | None, reason: str, out: Console) -> ReleaseDocument:
    """Make an earlier release live, as a flow where Prefect's server answers, else right here.

    Raises:
        InputError: ``to`` is no release number.
    """
    if to is not None and to < 1:
        raise InputError(f"--to {to} is no release number: they begin at 1.")
    rules, undelivered = read_policy(policy), ""
    if prefect_answers():
        release: Release = pipeline_module("flows.rollback").rollback(policy, to, reason)
        _print_live(release, policy, out)
    else:
        workspace = Workspace.of(rules)
        repository = open_target(rules.live_tables, workspace, channel="command")
        release = repository.rollback(rules.name, to, reason=reason)
        _print_live(release, policy, out)
        undelivered = _delivered(rules, workspace)
        _print_undelivered(undelivered, out)
    return ReleaseDocument(
        action="rolled back",
        model=release.model,
        live=True,
        release=release,
        promise=_promise_of(release, rules),
        undelivered=undelivered,
    )


def withdraw_live(policy: Path, who: str, reason: str, output: Printer) -> None:
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
    undelivered = ""
    if prefect_answers():
        release: Release = pipeline_module("flows.withdraw").withdraw(policy, reason, who)
        _print_withdrawn(release, policy, output.console)
    else:
        rules = read_policy(policy)
        workspace = Workspace.of(rules)
        repository = open_target(rules.live_tables, workspace, channel="command")
        release = repository.withdraw(rules.name, Withdrawal(who, reason))
        _print_withdrawn(release, policy, output.console)
        undelivered = _delivered(rules, workspace)
        _print_undelivered(undelivered, output.console)
    output.document(
        ReleaseDocument(
            action="withdrawn",
            model=release.model,
            live=False,
            release=release,
            promise=None,
            undelivered=undelivered,
        )
    )


def _promise_of(release: Release, rules: Policy) -> Promise | None:
    """What it is held to; None where that cannot be read: the rollback stands all the same."""
    try:
        return Layout(rules.target.repository, rules.name).held_to(release).promise
    except EnginegateError:
        return None  # `status` and `verify` say what is wrong with it


def _delivered(rules: Policy, workspace: Workspace) -> str:
    """Why MLflow could not be updated; empty: it was."""
    make_page = partial(page_of_log, rules=rules.approval)
    root = rules.target.repository
    return try_deliver(workspace, root, model=rules.name, make_page=make_page)


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
        print_hanging(
            out, "Prefect does not know yet; the next promotion, rollback or watch updates it."
        )
    if refusal:
        print_hanging(
            out, "MLflow does not know yet; the next promotion, rollback or watch updates it:"
        )
        print_hanging(out, refusal, "  ")


def _print_withdrawn(release: Release, policy: Path, out: Console) -> None:
    named = f"Release {release.version} of {release.model} ({release.engine.candidate})"
    print_hanging(out, f"{named} was withdrawn. Nothing is live.")
    next_ = f"Next: enginegate qualify {policy}; a promotion starts anew."
    out.print(next_, markup=False, soft_wrap=True)


def _print_live(release: Release, policy: Path, out: Console) -> None:
    named = f"Release {release.version} of {release.model}"
    print_hanging(out, f"{named} is live again: {release.engine.candidate}.")
    out.print(f"Next: enginegate status {policy}", markup=False, soft_wrap=True)


def pull_command(
    policy: PolicyFile,
    *,
    every: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="pull again after this many seconds, until Ctrl-C or SIGTERM: beside a Triton of "
            "its own. A pull that fails is told of, and tried again",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Bring this host to what is live in object storage: fetch, check, load, prove."""
    rules = read_policy(policy)
    storage = open_target(rules.live_tables, Workspace.of(rules), channel="command").storage
    if storage is None:
        raise PolicyError(f"{policy} names no target.objects, so there is nothing to pull.")
    if every is not None:
        if as_json:
            raise InputError("--every prints a line for each change; --json is for one pull.")
        _pull_again(rules.name, storage, every)
    with printing(as_json=as_json) as printed:
        release = storage.pull()
        printed.console.print(Text(_pulled(rules.name, storage, release)), soft_wrap=True)
        printed.document(
            ReleaseDocument(
                action="pulled" if release else "none",
                model=rules.name,
                live=release is not None,
                release=release,
                promise=release.promise if release else None,
            )
        )


def _pull_again(model: str, storage: StoredTarget, every_s: float) -> NoReturn:
    """Pull for as long as the process lives, and print what is new."""
    printed = ""
    while True:
        try:
            words = _pulled(model, storage, storage.pull())
        except EnginegateError as error:
            words = f"Not pulled; what is here goes on serving. {error}"
        if words != printed:
            typer.echo(words)
            printed = words
        time.sleep(every_s)


def _pulled(model: str, storage: StoredTarget, release: Release | None) -> str:
    where = storage.store.url
    if release is None:
        return f"Nothing of {model} is live in {where}."
    return f"Release {release.version} of {model} is live here, as in {where}."
