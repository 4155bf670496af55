"""Every verb. Each says what was done and the next command; exit codes say how it ended.

\b
Exit codes:
  0  done, every gate passed
  1  a fault in this program
  2  wrong use of the command
  3  gates failed
  4  inconclusive: the evidence is not enough
  5  could not find out (a server, a tool or the ledger is missing or broke)
  6  bad input: a policy, a model or data
  7  not approved
130  interrupted
"""

import getpass
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.logging import RichHandler

from enginegate.canonical import explain_validation
from enginegate.cli import doctor as _doctor
from enginegate.cli import live as _live
from enginegate.cli import shadow as _shadow
from enginegate.cli.checkout import of_checkout
from enginegate.decision import Decision
from enginegate.errors import ApprovalError, EnginegateError, ExitCode, InputError
from enginegate.evidence import Outcome, Scorecard
from enginegate.policy import Policy, read_policy
from enginegate.report import explain as explained
from enginegate.report import print_scorecard
from enginegate.triton.ports import Ports
from enginegate.workspace import Workspace, now

_EPILOG = "\n".join(line for line in (__doc__ or "").splitlines()[2:])

app = typer.Typer(
    name="enginegate",
    help=(
        "Promote a model: build every precision, judge each against FP32, benchmark it under "
        "Triton, "
        "ask a person, publish the exact bytes that passed.\n\n"
        "Start with [bold]enginegate doctor[/] and [bold]enginegate demo[/]."
    ),
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)
policy_app = typer.Typer(help="Look at policy files.", no_args_is_help=True)
app.add_typer(policy_app, name="policy")
app.add_typer(_shadow.app, name="shadow")
# A pipe has no width of its own; the tables need this much.
_PIPE_COLUMNS = 120
out = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
err = Console(
    stderr=True,
    highlight=False,
    emoji=False,
    width=None if sys.stderr.isatty() else _PIPE_COLUMNS,
)

PolicyFile = Annotated[
    Path, typer.Argument(help="the model family's policy, e.g. policies/digits.toml")
]
RunName = Annotated[str, typer.Argument(metavar="SCORECARD", help="digest, or its beginning")]
Approver = Annotated[str, typer.Option(help="who decides", default_factory=getpass.getuser)]


_EXIT_CODES = {
    Outcome.PASSED: ExitCode.GATES_FAILED,
    Outcome.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
    Outcome.FAILED: ExitCode.GATES_FAILED,
    Outcome.ERRORED: ExitCode.COULD_NOT_FIND_OUT,
}


def main() -> None:
    """Run the command; expected failures become one message and their exit code."""
    _log_to_terminal()
    try:
        app()
    except EnginegateError as error:
        err.print(f"[bold red]{_kind(error)}[/]: ", end="")
        err.print(str(error), markup=False)
        sys.exit(error.exit_code)
    except SystemExit as stop:
        if stop.code == ExitCode.INTERRUPTED:
            err.print("\nInterrupted. What was finished is kept; run it again to continue.")
        raise


@app.command()
def doctor() -> None:
    """Show what is here (Triton, TensorRT, GPU, …), what is missing, and how to get it."""
    out.print(_doctor.table())


@policy_app.command("check")
def policy_check(policy: PolicyFile) -> None:
    """Check a policy file and show what it asks for; every problem is listed with its place."""
    _explain(read_policy(policy))
    out.print(f"\n{policy} is valid. Next: enginegate qualify {policy}")


@app.command()
def qualify(
    policy: PolicyFile,
    model: Annotated[
        str | None, typer.Option(help="another version, e.g. models:/digits/2")
    ] = None,
) -> None:
    """Build, judge and benchmark every candidate; ends in a scorecard. Needs no person."""
    scorecard: Scorecard = of_checkout("flows.qualify").qualify(policy, model)
    print_scorecard(scorecard, out)
    if scorecard.winner is None:
        raise typer.Exit(_why_not(scorecard))
    out.print(f"\nNext: enginegate approve {scorecard.digest[:12]} --reason WHY")
    out.print(f"then: enginegate promote {policy} {scorecard.digest[:12]}")


@app.command()
def explain(run: RunName) -> None:
    """Say each verdict of a scorecard in words: what was checked, and by how much."""
    out.print(explained(Workspace.here().scorecard(run)), markup=False)


@app.command()
def approve(
    run: RunName,
    reason: Annotated[str, typer.Option(help="why; kept with the release")],
    approver: Approver,
) -> None:
    """Approve the winner of a scorecard. Binds to that digest, and expires."""
    scorecard = Workspace.here().scorecard(run)
    if scorecard.winner is None:
        raise ApprovalError(f"There is nothing to approve: {scorecard.reason}")
    _decide(scorecard, "approve", approver, reason)


@app.command()
def reject(
    run: RunName,
    reason: Annotated[str, typer.Option(help="why; kept in the workspace")],
    approver: Approver,
) -> None:
    """Reject a scorecard: it cannot be promoted unless somebody approves it later."""
    _decide(Workspace.here().scorecard(run), "reject", approver, reason)


@app.command()
def promote(policy: PolicyFile, run: RunName) -> None:
    """Publish the winner of an approved scorecard into the live repository; it is proved live."""
    release = of_checkout("flows.promote").promote(policy, run)
    out.print(f"Release {release.version} of {release.model} is live: {release.candidate}.")
    out.print(f"Next: enginegate status {policy}\nback: enginegate rollback {policy}")


@app.command()
def rollback(
    policy: PolicyFile,
    to: Annotated[int | None, typer.Option(help="release number; default: the one before")] = None,
) -> None:
    """Make an earlier release live again, proved like a promotion."""
    release = of_checkout("flows.rollback").rollback(policy, to)
    out.print(f"Release {release.version} of {release.model} is live again: {release.candidate}.")


@app.command()
def status(
    policies: Annotated[list[Path] | None, typer.Argument(metavar="[POLICY]…")] = None,
) -> None:
    """Show each model's live release, its digest and history, and what waits for a decision."""
    for path in _policies(policies):
        _live.print_status(read_policy(path), Workspace.here(), out)


@app.command()
def verify(
    policies: Annotated[list[Path] | None, typer.Argument(metavar="[POLICY]…")] = None,
    *,
    repair: Annotated[
        bool, typer.Option("--repair", help="finish or undo what was cut short")
    ] = False,
) -> None:
    """Recompute every digest of the live repository, and prove what its server serves."""
    good = [
        _live.print_verification(read_policy(p), out, repair=repair) for p in _policies(policies)
    ]
    if not all(good):
        raise typer.Exit(ExitCode.GATES_FAILED)


@app.command()
def serve(
    policy: PolicyFile,
    http_port: Annotated[int, typer.Option(help="0: any free port")] = 0,
    grpc_port: Annotated[int, typer.Option(help="0: any free port")] = 0,
) -> None:
    """Run Triton on a policy's live repository, on 127.0.0.1, until Ctrl-C."""
    ports = Ports(http=http_port, grpc=grpc_port)
    _live.serve(read_policy(policy), Workspace.here(), out, ports)


@app.command()
def demo(
    answer: Annotated[
        Literal["yes", "no", "ask"], typer.Option("--approve", help="how the approval is answered")
    ] = "yes",
) -> None:
    """Run the whole path on real parts, without a GPU: train, qualify, promote, roll back."""
    workspace = Workspace.here()
    # The demo leaves the user's own Prefect alone.
    home = workspace.root / "prefect"
    home.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("PREFECT_HOME", str(home))
    raise typer.Exit(of_checkout("examples.digits.demo").run(answer, workspace, out))


def _decide(
    scorecard: Scorecard, answer: Literal["approve", "reject"], approver: str, reason: str
) -> None:
    try:
        decision = Decision(
            scorecard_sha256=scorecard.digest,
            answer=answer,
            approver=approver,
            reason=reason,
            decided_at=now(),
        )
    except ValidationError as error:
        raise InputError(f"This is no decision:\n{explain_validation(error)}") from error
    Workspace.here().save_decision(decision)
    word = "Approved" if answer == "approve" else "Rejected"
    said = f"{word} by {approver}: scorecard {scorecard.digest[:12]} ({scorecard.model_uri})."
    out.print(said, markup=False)
    resumed = _live.answer_suspended(decision)
    for name in resumed:
        out.print(f"The suspended run {name} continues.")
    if answer == "approve" and not resumed:
        out.print(f"Next: enginegate promote POLICY {scorecard.digest[:12]}")


def _explain(policy: Policy) -> None:
    names = ", ".join(str(candidate) for candidate in policy.candidates.all())
    search = policy.search
    configurations = (
        len(search.max_batch_sizes) * len(search.queue_delays_us) * len(search.instances)
    )
    out.print(f"model       {policy.model.uri} -> {policy.name} in {policy.target.repository}")
    out.print(f"candidates  {names}")
    out.print(
        f"SLO         p99 <= {policy.slo.p99_ms:g} ms at {policy.slo.min_throughput_per_s:g} "
        f"requests/s or more, with {policy.slo.confidence:.0%} confidence"
    )
    out.print(f"search      {configurations} configurations, {search.budget_s:g} s a candidate")
    out.print(f"digest      {policy.digest}")


def _why_not(scorecard: Scorecard) -> ExitCode:
    outcomes = [scorecard.outcome(verdict.candidate) for verdict in scorecard.verdicts]
    return _EXIT_CODES[max(outcomes, default=Outcome.INCONCLUSIVE)]


def _policies(given: list[Path] | None) -> list[Path]:
    found = given or sorted(Path("policies").glob("*.toml"))
    if not found:
        raise InputError(
            f"{Path.cwd()} has no policies/*.toml. Name a policy, or change into your checkout."
        )
    return found


def _kind(error: EnginegateError) -> str:
    return error.exit_code.name.replace("_", " ").capitalize()


def _log_to_terminal() -> None:
    handler: logging.Handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    if err.is_terminal:
        handler = RichHandler(
            console=err, show_path=False, show_level=False, log_time_format="%H:%M:%S"
        )
    logging.getLogger("great_expectations").setLevel(logging.WARNING)
    logger = logging.getLogger("enginegate")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
