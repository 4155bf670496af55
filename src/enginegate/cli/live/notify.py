"""Whether messages to people arrive, and where workers find the addresses."""

import sys

import typer

from enginegate.cli.output.json_output import JsonFlag, printing
from enginegate.cli.output.records import NotifyDocument, NotifyReceiver
from enginegate.errors import ExitCode, InputError
from enginegate.machine import user_at_host
from enginegate.notifications import (
    SETTING,
    Message,
    Receivers,
    receivers_of_environment,
    receivers_of_text,
)
from enginegate.pipeline import pipeline_module
from enginegate.report.tables import print_hanging

notify_app = typer.Typer(
    help="Messages to people through Apprise: try them, keep their addresses.",
    no_args_is_help=True,
)


@notify_app.command("test")
def notify_test_command(*, as_json: JsonFlag = False) -> None:
    """Send a message to every receiver, and say which of them took it.

    Addresses are those of ENGINEGATE_NOTIFY, else of Prefect's Secret block enginegate-notify. Ends
    with 5 if a receiver did not take it.
    """
    with printing(as_json=as_json) as output:
        receivers = found_receivers()
        if receivers is None:
            raise InputError(
                f"Nobody is told of anything: {SETTING} is not set, and Prefect's Secret block "
                "enginegate-notify is not there or no server is named. Set one of them to "
                "addresses of Apprise: docs/notifications.md."
            )
        message = Message(
            "Enginegate can reach you",
            f"A test by {user_at_host()}. Approvals that wait, broken promises and errored "
            "watches will arrive here.",
        )
        answers = receivers.send(dict.fromkeys(receivers.labels, message))
        for answer in answers:
            print_hanging(
                output.console, f"receiver {answer.receiver}: {answer.why or 'took the message'}"
            )
        output.document(
            NotifyDocument(
                origin=receivers.origin,
                receivers=tuple(
                    NotifyReceiver(receiver=each.receiver, why_not=each.why) for each in answers
                ),
            )
        )
    if any(answer.why for answer in answers):
        raise typer.Exit(ExitCode.COULD_NOT_FIND_OUT)


@notify_app.command("save")
def notify_save_command(*, as_json: JsonFlag = False) -> None:
    """Keep the addresses of ENGINEGATE_NOTIFY, or of the input, in Prefect's Secret block.

    Every worker finds them there. They are no option: a command line is everybody's to read.
    """
    with printing(as_json=as_json) as output:
        given = receivers_of_environment() or _typed()
        done: str = pipeline_module("flows.notices").save_receivers(given)
        print_hanging(output.console, done)
        output.document(
            NotifyDocument(
                origin=given.origin,
                receivers=tuple(NotifyReceiver(receiver=label) for label in given.labels),
            )
        )


def found_receivers() -> Receivers | None:
    """Those that flows of this environment would find; Prefect is loaded to look into its block.

    Raises:
        InputError: what is named there are no addresses.
        EnginegateError: the Prefect server that is named does not answer.
    """
    found = receivers_of_environment()
    if found is None:
        found = pipeline_module("flows.notices").configured_receivers()
    return found


def _typed() -> Receivers:
    if sys.stdin.isatty():
        text = typer.prompt("Addresses, with spaces between them", hide_input=True, err=True)
    else:
        text = sys.stdin.read()
    return receivers_of_text(text, "the input")
