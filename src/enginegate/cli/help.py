"""`enginegate --help`: verbs in the order of a promotion, grouped; `--version`; completion."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import typer
from typer.core import TyperGroup

from enginegate import __version__
from enginegate.workspace import Workspace

# The order in which somebody meets them, each in one line of an 80 column terminal. A verb that is
# not listed comes last, in a panel of its own, with the beginning of its help.
STORY: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Begin": {
            "doctor": "What is here, what is missing, and how to get it.",
            "demo": "The whole path on real parts, without a GPU.",
            "init": "Write a first policy for a model and its data.",
            "policy": "Check and explain policies, before anything is built.",
        },
        "Collect evidence": {
            "qualify": "Build, judge and benchmark every candidate: a scorecard.",
            "explain": "The verdicts of a scorecard in words.",
            "report": "A scorecard as one HTML page, to read or to send.",
            "ui": "Open MLflow's pages of the comparison.",
            "benchmark": "Only search for the serving configuration that meets the SLO.",
            "shadow": "Record, import and describe samples of live traffic.",
            "evidence": "Carry evidence from other machines: one file out, one file in.",
        },
        "Decide": {
            "approve": "Approve the winner: binds to the scorecard's digest, expires.",
            "reject": "Reject a scorecard.",
        },
        "Go live, and back": {
            "serve": "Run Triton on the live repository, until Ctrl-C.",
            "promote": "Publish what was approved, and prove that it serves.",
            "status": "What is live, what it promised, and what waits for a person.",
            "call": "Ask what is live: answer, label, and lines to copy.",
            "verify": "Recompute every digest, and prove what the servers serve.",
            "rollback": "Make an earlier release live again.",
            "withdraw": "Unload a first release: nothing is live afterwards.",
        },
        "Keep the promise": {
            "watch": "Compare what is live with what was promised.",
            "metrics": "Promises and checks for Prometheus to scrape.",
            "acknowledge": "Say that somebody knows of a broken promise.",
            "audit": "Who did what, when and why; and that nothing was changed.",
        },
        "Run by itself": {
            "deploy": "Flows and schedules on your Prefect server, for its workers.",
            "scan": "Qualify new versions that the registry marks.",
            "notify": "Messages to people, where they are: try them.",
            "automations": "Messages by your Prefect server when somebody is needed.",
            "pull": "Bring this host to what is live in object storage.",
            "prune": "Show, then delete, what nothing refers to any more.",
        },
        "Look after it": {
            "backup": "One file of all that cannot be made again; keys encrypted.",
            "restore": "Bring a backup to an empty place; checked before it is written.",
        },
    }
)
_PANELS = {verb: panel for panel, verbs in STORY.items() for verb in verbs}
_SUMMARIES = {verb: text for verbs in STORY.values() for verb, text in verbs.items()}
_DIGEST_SHOWN = 12


class StoryGroup(TyperGroup):
    """The command's verbs, in the order of `STORY`, each in its panel."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Every verb, by its place in the story."""
        places = list(_PANELS)
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: places.index(name) if name in _PANELS else len(names))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A verb; its own help says more than the list does."""
        command: Any = super().get_command(ctx, cmd_name)
        if command is not None and cmd_name in _PANELS:
            command.rich_help_panel = _PANELS[cmd_name]
            command.short_help = _SUMMARIES[cmd_name]
        return command


def print_version(asked: bool) -> None:  # noqa: FBT001 - Typer calls it with a single argument
    """Print the installed version and end, where ``--version`` was given."""
    if asked:
        typer.echo(f"enginegate {__version__}")
        raise typer.Exit


def scorecards_beginning(incomplete: str) -> list[str]:
    """The short digests that a shell completes SCORECARD with, the newest first."""
    paths = (Workspace.here().root / "scorecards").glob("*.json")
    newest = sorted(paths, key=lambda path: -path.stat().st_mtime)
    return [path.stem[:_DIGEST_SHOWN] for path in newest if path.stem.startswith(incomplete)]
