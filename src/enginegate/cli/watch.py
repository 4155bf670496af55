"""Watching what is live, and scanning the registry, on the command line."""

import getpass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from enginegate.cli import acknowledge as _acknowledge
from enginegate.cli.checkout import of_checkout
from enginegate.cli.pull import pull
from enginegate.policy import read_policy
from enginegate.watch.log import PromiseBrokenError, WatchCheck, Watched, gate_of

_out = Console(highlight=False, markup=False, emoji=False)

PolicyFile = Annotated[Path, typer.Argument(help="the model family's policy")]


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    app.command()(watch)
    app.command()(acknowledge)
    app.command()(automations)
    app.command()(scan)
    app.command()(pull)


def watch(
    policy: PolicyFile,
    *,
    once: Annotated[bool, typer.Option("--once", help="one look, also at a young release")] = False,
) -> None:
    """Compare what is live with what was promised; does what watch.on_failure says.

    Ends with 3 if a promise was broken, now or earlier, and nobody has acknowledged it.
    """
    read_policy(policy)  # a mistake in it is told before Prefect is started
    flow = of_checkout("flows.watch")
    try:
        _show_run(flow.watch(policy, 0.0) if once else flow.watch(policy))
    except PromiseBrokenError as error:
        _show_run(error.watched)
        raise


def acknowledge(
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
) -> None:
    """Acknowledge a broken promise: from then on the newest check is shown. Kept in the audit log.

    A check that fails later needs its own acknowledgement.
    """
    _acknowledge.acknowledge(read_policy(policy), approver, reason, release, _out)


def _show_run(seen: Watched) -> None:
    for sentence in seen.done:
        _out.print(sentence)
    for look in seen.looks:
        _show(look)
    if not seen.looks:
        _out.print("Nothing is live, or it is being rolled out to a fleet.")


def automations(
    webhook: Annotated[
        str | None,
        typer.Option(
            help="where messages are posted as JSON, e.g. of Slack or Mattermost; kept as a secret "
            "in Prefect's webhook block 'enginegate'. Default: where that block says",
            envvar="ENGINEGATE_WEBHOOK",
        ),
    ] = None,
) -> None:
    """Create or update, on your Prefect server, the automations in automations/ of this checkout.

    They send a message when a promise was broken, when a promotion waits for a person, and when no
    watch ran for half an hour.
    """
    done: tuple[str, ...] = of_checkout("flows.automations").apply_automations(webhook)
    for sentence in done:
        _out.print(sentence)


def scan(
    policy: PolicyFile,
    deployment: Annotated[
        str | None, typer.Option(help="who qualifies, e.g. qualify/digits; default: this process")
    ] = None,
) -> None:
    """Qualify each version of the registry that carries the policy's alias or tag, once."""
    read_policy(policy)  # a mistake in it is told before Prefect is started
    started: tuple[str, ...] = of_checkout("flows.scan").scan(policy, deployment)
    for uri in started:
        _out.print(f"Started: {uri}")
    if not started:
        _out.print("No new version.")


def _show(look: WatchCheck) -> None:
    kind = "intensive" if look.intensive else "steady"
    _out.print(
        f"Look {look.number} ({kind}) at release {look.version} of {look.model}: "
        f"{look.outcome.word}; action: {look.action}"
    )
    for finding in look.findings:
        word = f"{finding.outcome.word}{', advisory' if finding.advisory else ''}"
        _out.print(f"  {gate_of(finding)} ({word}): {finding.reason}")
