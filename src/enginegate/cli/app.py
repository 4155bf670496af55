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
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from enginegate.cli import approve as _approve
from enginegate.cli import audit as _audit
from enginegate.cli import benchmark as _benchmark
from enginegate.cli import doctor as _doctor
from enginegate.cli import live as _live
from enginegate.cli import rollback as _rollback
from enginegate.cli import shadow as _shadow
from enginegate.cli import watch as _watch
from enginegate.cli.checkout import of_checkout
from enginegate.cli.policies import policies_of, print_policy
from enginegate.cli.terminal import INTERRUPTED, err, interruptible, log_to_terminal, out
from enginegate.cli.vendor_log import vendors_logged
from enginegate.errors import EnginegateError, ExitCode, InputError
from enginegate.evidence import Outcome, Scorecard
from enginegate.policy import read_policy
from enginegate.report import explain as explained
from enginegate.report import print_scorecard
from enginegate.triton.ports import Ports
from enginegate.workspace import Workspace

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
_watch.register(app)
_benchmark.register(app)
PolicyFile = Annotated[
    Path, typer.Argument(help="the model family's policy, e.g. policies/digits.toml")
]
RunName = Annotated[str, typer.Argument(metavar="SCORECARD", help="digest, or its beginning")]
RulesFile = Annotated[
    Path | None, typer.Option("--policy", help="default: the one of policies/ that it was made by")
]
Approver = Annotated[str, typer.Option(help="who decides", default_factory=getpass.getuser)]


_EXIT_CODES = {
    Outcome.PASSED: ExitCode.GATES_FAILED,
    Outcome.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
    Outcome.FAILED: ExitCode.GATES_FAILED,
    Outcome.ERRORED: ExitCode.COULD_NOT_FIND_OUT,
}


def main() -> None:
    """Run the command; expected failures become one message and their exit code."""
    log_to_terminal()
    try:
        app()
    except EnginegateError as error:
        _print_error(error)
        sys.exit(error.exit_code)
    except SystemExit as stop:
        if stop.code == ExitCode.INTERRUPTED:
            err.print(INTERRUPTED)
        raise


@app.callback()
def _every_command(context: typer.Context) -> None:
    context.obj = context.with_resource(vendors_logged(Workspace.here()))


@app.command()
def doctor(
    server: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="gRPC address: try out on this Triton, under load and with a model of our own, "
            "what promotions rely on",
        ),
    ] = None,
    repository: Annotated[
        Path | None, typer.Option(help="with --server: a folder that it reads models from")
    ] = None,
) -> None:
    """Show what is here (Triton, TensorRT, GPU, …), what is missing, and how to get it."""
    if server is None:
        out.print(_doctor.table())
        return
    outcome = _doctor.print_contract(server, repository, out)
    if outcome is not Outcome.PASSED:
        raise typer.Exit(_EXIT_CODES[outcome])


@policy_app.command("check")
def policy_check(policy: PolicyFile) -> None:
    """Check a policy file and show what it asks for; every problem is listed with its place."""
    print_policy(read_policy(policy), out)
    out.print(f"\n{policy} is valid. Next: enginegate qualify {policy}")


@app.command()
def qualify(
    policy: PolicyFile,
    model: Annotated[
        str | None, typer.Option(help="another version, e.g. models:/digits/2")
    ] = None,
) -> None:
    """Build, judge and benchmark every candidate; ends in a scorecard. Needs no person."""
    flow = of_checkout("flows.qualify")
    with interruptible(out):
        scorecard: Scorecard = flow.qualify(policy, model)
    print_scorecard(scorecard, out, Workspace.here().engine_sizes(scorecard))
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
    candidate: Annotated[
        str, typer.Option(help="another than the winner, as KIND-PRECISION", show_default=False)
    ] = "",
    *,
    accept_inconclusive: Annotated[
        bool, typer.Option("--accept-inconclusive", help="accept what is inconclusive about it")
    ] = False,
    policy: RulesFile = None,
) -> None:
    """Approve the winner of a scorecard. Binds to that digest, and expires."""
    workspace = Workspace.here()
    given = _approve.Answer("approve", approver, reason, candidate, accept_inconclusive)
    _approve.decide(workspace.scorecard(run), given, policy, workspace, out)


@app.command()
def reject(
    run: RunName,
    reason: Annotated[str, typer.Option(help="why; kept in the workspace")],
    approver: Approver,
    policy: RulesFile = None,
) -> None:
    """Reject a scorecard: it cannot be promoted unless somebody approves it later."""
    workspace = Workspace.here()
    given = _approve.Answer("reject", approver, reason)
    _approve.decide(workspace.scorecard(run), given, policy, workspace, out)


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
    reason: Annotated[str, typer.Option(help="why; kept in the audit log")] = "",
) -> None:
    """Make an earlier release live again, proved like a promotion. Needs folder and server only."""
    _rollback.roll_back(policy, to, reason, out)


@app.command()
def audit(
    policy: PolicyFile,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="one event a line")] = False,
) -> None:
    """Show who did what, when and why; verify that nothing was changed or removed."""
    if not _audit.print_audit(read_policy(policy), out, as_json=as_json):
        raise typer.Exit(ExitCode.GATES_FAILED)


@app.command()
def status(
    policies: Annotated[list[Path] | None, typer.Argument(metavar="[POLICY]…")] = None,
) -> None:
    """Show each model's live release, its digest and history, and what waits for a decision."""
    workspace = Workspace.here()
    code = _for_each(policies_of(policies), lambda path: _live.print_status(path, workspace, out))
    for message in workspace.unreadable():
        code = code or ExitCode.BAD_INPUT
        _print_error(InputError(message))
    raise typer.Exit(code)


@app.command()
def verify(
    policies: Annotated[list[Path] | None, typer.Argument(metavar="[POLICY]…")] = None,
    *,
    repair: Annotated[
        bool, typer.Option("--repair", help="finish or undo what was cut short")
    ] = False,
) -> None:
    """Recompute every digest of the live repository, and prove what its server serves."""
    good = []

    def check(path: Path) -> None:
        good.append(_live.print_verification(read_policy(path), out, repair=repair))

    code = _for_each(policies_of(policies), check)
    raise typer.Exit(code if all(good) else ExitCode.GATES_FAILED)


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
    path = of_checkout("examples.digits.demo")
    with interruptible(out):
        code = path.run(answer, workspace, out)
    raise typer.Exit(code)


def _why_not(scorecard: Scorecard) -> ExitCode:
    outcomes = [scorecard.outcome(verdict.candidate) for verdict in scorecard.verdicts]
    return _EXIT_CODES[max(outcomes, default=Outcome.INCONCLUSIVE)]


def _for_each(paths: Sequence[Path], do: Callable[[Path], None]) -> ExitCode:
    """Do it for every policy; one that cannot be read or looked at is shown and left out.

    Returns:
        The first one's exit code; OK if there is none.
    """
    code = ExitCode.OK
    for path in paths:
        try:
            do(path)
        except EnginegateError as error:
            code = code or error.exit_code
            _print_error(error)
    return code


def _print_error(error: EnginegateError) -> None:
    err.print(f"[bold red]{_kind(error)}[/]: ", end="")
    err.print(str(error), markup=False)


def _kind(error: EnginegateError) -> str:
    return error.exit_code.name.replace("_", " ").capitalize()
