"""Watching what is live, and scanning the registry, on the command line."""

import getpass
from contextlib import suppress
from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from enginegate.cli.failures import EXIT_CODES
from enginegate.cli.live.status import live_checks
from enginegate.cli.output.json_output import JsonFlag, Printer, printing
from enginegate.cli.output.junit import JunitFile, write_watch_junit
from enginegate.cli.output.records import (
    AcknowledgeDocument,
    AutomationsDocument,
    BrokenPromiseStatus,
    CheckDone,
    ScanDocument,
    WatchDocument,
)
from enginegate.cli.policies import PolicyFile
from enginegate.errors import EnginegateError
from enginegate.evidence import Finding, Outcome
from enginegate.pipeline import pipeline_module
from enginegate.policy import Policy, read_policy
from enginegate.report import page_of_log
from enginegate.report.tables import print_hanging
from enginegate.repository import AuditLog, Layout
from enginegate.repository.history import broken_promises as promises
from enginegate.tracking import try_deliver
from enginegate.watch.log import PromiseBrokenError, WatchCheck, WatchLog, WatchResult, gate_of
from enginegate.workspace import Workspace


def watch_command(
    policy: PolicyFile,
    *,
    once: Annotated[
        bool, typer.Option("--once", help="only one check; the command ends with its outcome")
    ] = False,
    junit: JunitFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare what is live with what was promised; does what watch.on_failure says.

    Ends with 3 if a promise was broken, now or earlier, and nobody has acknowledged it; with 5 if
    what is live could not be measured. With --once also with 4 if its check is inconclusive, or
    nothing is live to check.
    """
    model = read_policy(policy).name  # a mistake in it is shown before Prefect is started
    with printing(as_json=as_json) as output:
        flow = pipeline_module("flows.watch")
        try:
            watched: WatchResult = flow.watch(policy, 0.0) if once else flow.watch(policy)
        except PromiseBrokenError as error:
            write_watch_junit(error.watched.checks, junit, model=model, ended=_finding(error))
            _print_run(error.watched, output, broken=str(error))
            raise
        except EnginegateError as error:
            write_watch_junit((), junit, model=model, ended=_finding(error))
            raise
        write_watch_junit(watched.checks, junit, model=model)
        _print_run(watched, output)
    if once and (code := EXIT_CODES[_outcome(watched)]):
        raise typer.Exit(code)


def _finding(error: EnginegateError) -> Finding:
    """Why a run of the watch failed, as JUnit shows it."""
    broken = isinstance(error, PromiseBrokenError)
    outcome = Outcome.FAILED if broken else Outcome.ERRORED
    return Finding(gate="promise_kept", scope="live", outcome=outcome, reason=str(error))


def _outcome(watched: WatchResult) -> Outcome:
    """The worst check's; where nothing was checked there is no evidence, which is inconclusive."""
    return max((check.outcome for check in watched.checks), default=Outcome.INCONCLUSIVE)


def acknowledge_command(
    policy: PolicyFile,
    reason: Annotated[str, typer.Option(help="what was found out or will be done")],
    approver: Annotated[
        str,
        typer.Option(
            "--approver", "--name", help="who acknowledges", default_factory=getpass.getuser
        ),
    ],
    release: Annotated[
        int | None, typer.Option(help="only this release; default: each that waits")
    ] = None,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Acknowledge a broken promise: from then on the newest check is shown. Kept in the audit log.

    A check that fails later needs its own acknowledgement.
    """
    with printing(as_json=as_json) as output:
        _acknowledge(read_policy(policy), approver, reason, release, output)


def _print_run(watched: WatchResult, output: Printer, *, broken: str = "") -> None:
    for sentence in watched.done:
        print_hanging(output.console, sentence)
    for check in watched.checks:
        _print_check(check, output.console)
    if not watched.checks:
        print_hanging(output.console, "Nothing is live, or it is being rolled out to a fleet.")
    checks = tuple(CheckDone(outcome=check.outcome, check=check) for check in watched.checks)
    output.document(WatchDocument(done=watched.done, checks=checks, broken=broken))


def automations_command(
    webhook: Annotated[
        str | None,
        typer.Option(
            help="where messages are posted as JSON, e.g. of Slack or Mattermost; kept as a secret "
            "in Prefect's webhook block 'enginegate'. Default: where that block says",
            envvar="ENGINEGATE_WEBHOOK",
        ),
    ] = None,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Create or update automations on your Prefect server: those in automations/, or the shipped.

    They send a message when a promise was broken, when a promotion waits for a person, and when no
    watch ran for half an hour.
    """
    with printing(as_json=as_json) as output:
        done: tuple[str, ...] = pipeline_module("flows.automations").apply_automations(webhook)
        for sentence in done:
            print_hanging(output.console, sentence)
        output.document(AutomationsDocument(done=done))


def scan_command(
    policy: PolicyFile,
    deployment: Annotated[
        str | None,
        typer.Option(help="who qualifies, e.g. qualify/qualify-digits; default: this process"),
    ] = None,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Qualify each version of the registry that carries the policy's alias or tag, once."""
    read_policy(policy)  # a mistake in it is shown before Prefect is started
    with printing(as_json=as_json) as output:
        started: tuple[str, ...] = pipeline_module("flows.scan").scan(policy, deployment)
        for uri in started:
            print_hanging(output.console, f"Started: {uri}")
        if not started:
            print_hanging(output.console, "No new version.")
        output.document(ScanDocument(started=started))


def _print_check(check: WatchCheck, out: Console) -> None:
    kind = "intensive" if check.intensive else "steady"
    print_hanging(
        out,
        f"Check {check.number} ({kind}) of release {check.version} of {check.model}: "
        f"{check.outcome.word}; action: {check.action}",
    )
    for finding in check.findings:
        word = f"{finding.outcome.word}{', advisory' if finding.advisory else ''}"
        print_hanging(out, f"{gate_of(finding)} ({word}): {finding.reason}", "  ")


def _acknowledge(policy: Policy, who: str, why: str, release: int | None, output: Printer) -> None:
    """Write who knows of a broken promise into the audit log, and update MLflow.

    Raises:
        InputError: nothing waits for an acknowledgement, or name or reason are missing.
        RepositoryError: the audit log cannot be written, or was changed.
    """
    root, workspace = policy.target.repository, Workspace.of(policy)
    layout = Layout(root, policy.name)
    given = promises.Acknowledgement(who, why, release, channel="command")
    done = promises.acknowledge(root, policy.name, given, live_checks(layout, workspace))
    out = output.console
    for broken in done:
        print_hanging(out, f"Acknowledged by {who}: {broken}.")
    events, states = AuditLog(root).of(policy.name), {}
    for number in sorted({broken.release for broken in done}):
        with suppress(EnginegateError):  # the manifest of a withdrawn release is gone
            manifest = layout.release(number)
            checks = WatchLog.at(workspace, manifest).read()
            state = promises.shown_state(events, policy.name, number, checks)
            states[number] = state.word
            print_hanging(out, f"Release {number} is shown as: {state.word}.")
    make_page = partial(page_of_log, rules=policy.approval)
    refusal = try_deliver(workspace, root, model=policy.name, make_page=make_page)
    if refusal:
        print_hanging(out, f"MLflow is updated later: {refusal.splitlines()[0]}")
    acknowledged = tuple(
        BrokenPromiseStatus(release=b.release, check=b.check, at=b.at, why=b.why) for b in done
    )
    output.document(AcknowledgeDocument(acknowledged=acknowledged, states=states))
