"""Every verb. Each says what was done and the next command; exit codes say how it ended.

\b
Exit codes:
  0  done, every gate passed
  1  a fault in this program
  2  wrong use of the command
  3  gates failed, or a live release broke its promise
  4  inconclusive: the evidence is not enough
  5  could not find out (a server, a tool or MLflow is missing or broke)
  6  bad input: a policy, a model or data
  7  not approved
130  interrupted; 143 and 129: ended by SIGTERM, SIGHUP
"""

import getpass
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.text import Text

from enginegate.cli import approve as _approve
from enginegate.cli import benchmark as _benchmark
from enginegate.cli import deploy as _deploy
from enginegate.cli import doctor as _doctor
from enginegate.cli import evidence as _evidence
from enginegate.cli import prune as _prune
from enginegate.cli import shadow as _shadow
from enginegate.cli.failures import EXIT_CODES, failure_of, keep_traceback
from enginegate.cli.help import StoryGroup, print_version, scorecards_beginning
from enginegate.cli.live import backup as _backup
from enginegate.cli.live import call as _call
from enginegate.cli.live import exporter as _exporter
from enginegate.cli.live import notify as _notify
from enginegate.cli.live import release as _release
from enginegate.cli.live import repository as _live
from enginegate.cli.live import status as _status
from enginegate.cli.live import watch as _watch
from enginegate.cli.output.json_output import JsonFlag, printing
from enginegate.cli.output.junit import JunitFile, write_scorecard_junit
from enginegate.cli.output.live_table import qualification_shown
from enginegate.cli.output.records import (
    PageDocument,
    VerifiedRepository,
    VerifyDocument,
)
from enginegate.cli.output.scorecard_document import (
    commands_after,
    qualification_outcome,
    scorecard_document,
)
from enginegate.cli.policies import PolicyFile, PolicyFiles, policies_of, print_check
from enginegate.cli.policy import init as _init
from enginegate.cli.policy.show import show_policy
from enginegate.cli.report import write_report
from enginegate.cli.terminal import (
    ended_by,
    err,
    interruptible,
    log_to_terminal,
    out,
    terminable,
)
from enginegate.cli.ui import show_ui
from enginegate.cli.vendor_log import vendors_logged
from enginegate.errors import EnginegateError, ExitCode, InputError
from enginegate.evidence import Outcome, Scorecard
from enginegate.machine import LAST_PORT
from enginegate.pipeline import pipeline_module
from enginegate.policy import Policy, read_policy
from enginegate.policy.paths import WORKSPACE
from enginegate.report import candidates_named, print_explained, print_scorecard
from enginegate.report.tables import as_text, print_hanging
from enginegate.tracking import START_COMMAND
from enginegate.triton.server import Ports
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
    cls=StoryGroup,
)
policy_app = typer.Typer(help="Check and explain policy files.", no_args_is_help=True)
app.add_typer(policy_app, name="policy")
app.add_typer(_shadow.shadow_app, name="shadow")
app.add_typer(_evidence.evidence_app, name="evidence")
app.add_typer(_notify.notify_app, name="notify")
RunName = Annotated[
    str,
    typer.Argument(
        metavar="SCORECARD",
        help="digest, or its beginning",
        autocompletion=scorecards_beginning,
    ),
]
RulesFile = Annotated[
    Path | None, typer.Option("--policy", help="default: the one of policies/ that it was made by")
]
Approver = Annotated[str, typer.Option(help="who decides", default_factory=getpass.getuser)]


def run_command() -> None:
    """Run the command; expected failures become one message and their exit code."""
    log_to_terminal()
    try:
        with terminable():
            app()
    except EnginegateError as error:
        _print_error(error)
        sys.exit(error.exit_code)
    except SystemExit as stop:
        if last_words := ended_by(stop.code):
            err.print(last_words)
        raise
    except BrokenPipeError:
        # Whoever read what we print has gone, as `head` does; Python must not print that at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.CRASH)
    except Exception as error:  # noqa: BLE001 - a traceback is no message
        sys.exit(_report(error))


def _report(error: Exception) -> ExitCode:
    """One message for an unexpected exception; its traceback goes to a file."""
    failure = failure_of(error)
    _print_message(failure.kind, failure.message)
    if failure.our_fault:
        path = keep_traceback(error)
        where = f"is in {path}" if path else "could not be written anywhere"
        err.print(f"The whole traceback {where}.", markup=False)
    return failure.exit_code


@app.callback()
def _every_command(
    context: typer.Context,
    *,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=print_version, is_eager=True
        ),
    ] = False,
) -> None:
    context.obj = context.with_resource(vendors_logged(Workspace.here()))


@app.command("doctor")
def doctor_command(
    server: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="gRPC address: check on this Triton, under load and with a model of our own, "
            "what promotions rely on",
        ),
    ] = None,
    repository: Annotated[
        Path | None, typer.Option(help="with --server: a folder that it reads models from")
    ] = None,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Show what is here (Triton, TensorRT, GPU, …), what is missing, and how to get it."""
    if server is None:
        if repository is not None:
            raise InputError("--repository goes with --server: it names what that server reads.")
        with printing(as_json=as_json) as output:
            _doctor.print_parts(output)
        return
    with printing(as_json=as_json) as output:
        outcome = _doctor.print_contract(server, repository, output)
    if outcome is not Outcome.PASSED:
        raise typer.Exit(EXIT_CODES[outcome])


app.command("init")(_init.init_command)


@policy_app.command("check")
def policy_check_command(policy: PolicyFile, *, as_json: JsonFlag = False) -> None:
    """Check a policy file, and what it names, and show what it asks for.

    Every problem is listed with its place: keys and limits, files, functions and types. What no
    device or data here can decide is listed too. Nothing is built, opened or run.
    """
    with printing(as_json=as_json) as output:
        print_check(read_policy(policy), policy, output)


@policy_app.command("show")
def policy_show_command(
    policy: Annotated[
        Path | None,
        typer.Argument(metavar="[POLICY]", help="default: what every policy may leave out"),
    ] = None,
    table: Annotated[
        list[str] | None, typer.Option(help="only this table, e.g. gates; may repeat")
    ] = None,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Show every key of a policy: its value, where that comes from, and what it means.

    Under tolerances = "standard", the table gates shows which limit each precision gets, and why.
    """
    with printing(as_json=as_json) as output:
        show_policy(policy, table or [], output)


@app.command("qualify")
def qualify_command(
    policy: PolicyFile,
    model: Annotated[
        str | None, typer.Option(help="another version, e.g. models:/digits/2")
    ] = None,
    *,
    device: Annotated[
        str | None,
        typer.Option(help="only the part of this kind of device, on a machine that has one"),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="end with 3 where any candidate failed, also beside a winner"
        ),
    ] = False,
    junit: JunitFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Build, judge and benchmark every candidate; ends in a scorecard. Needs no person.

    Ends with 0 if there is a winner, also where other candidates failed; without one with the worst
    outcome of a candidate: 3 failed, 4 inconclusive, 5 errored.
    """
    rules = read_policy(policy)  # a mistake in it is shown before Prefect is started
    if model is not None:
        rules = rules.with_model(model)
    if device is not None:
        _evidence.qualify_device_here(rules, policy, device, as_json=as_json)
        return
    with printing(as_json=as_json) as output:
        flow, out = pipeline_module("flows.qualify"), output.console
        with qualification_shown(rules):
            scorecard: Scorecard = flow.qualify(policy, model)
        write_scorecard_junit(scorecard, junit)
        print_scorecard(scorecard, out, _workspace(policy).engine_sizes(scorecard))
        commands = commands_after(scorecard, policy)
        out.print(f"Compare: {_ui_of(scorecard, policy)}", markup=False, soft_wrap=True)
        for word, command in zip(("Next:", "then:"), commands, strict=False):
            out.print(f"{word} {command}", markup=False, soft_wrap=True)
        output.document(scorecard_document(scorecard, policy=policy))
    if code := _end_of_qualification(scorecard, strict=strict):
        raise typer.Exit(code)


app.command("benchmark")(_benchmark.benchmark_command)


@app.command("explain")
def explain_command(
    run: RunName,
    candidate: Annotated[
        list[str] | None, typer.Option(help="KIND-PRECISION, may repeat; default: all of them")
    ] = None,
    only: Annotated[
        Literal["blocking"] | None,
        typer.Option(help="only what keeps candidates from passing, and what to do about it"),
    ] = None,
    junit: JunitFile = None,
    *,
    device: Annotated[
        str | None, typer.Option(help="kind of device; default: that of the target's own server")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Explain each verdict of a scorecard in words: which check decided, and by how much."""
    with printing(as_json=as_json) as output:
        card = Workspace.here().scorecard(run)
        write_scorecard_junit(card, junit)
        shown = _evidence.seen_on(card, device)
        wanted = candidates_named(shown, candidate or ())
        print_explained(shown, output.console, only=wanted, blocking=only is not None)
        output.document(scorecard_document(card, only=wanted, blocking=only is not None))


@app.command("report")
def report_command(
    run: RunName,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="default: decision-DIGEST.html here"),
    ] = None,
    policy: RulesFile = None,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Write a scorecard as one HTML page: the verdict, what would change, every check.

    The file needs no network and no other file. Its evidence is the same byte for byte whenever it
    is made again; state and timeline come from the audit log of the policy's live repository.
    """
    workspace = _workspace(policy)
    scorecard = workspace.scorecard(run)
    file = output or Path(f"decision-{scorecard.digest[:12]}.html")
    with printing(as_json=as_json) as printed:
        write_report(scorecard, policy, file, workspace, printed.console)
        printed.document(PageDocument(scorecard=scorecard.digest, file=str(file.absolute())))


@app.command("ui")
def ui_command(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[SCORECARD]", help="digest, or its beginning; default: the newest"),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=LAST_PORT,
            help="on 127.0.0.1; default: the one that filed links lead to, if it is free",
        ),
    ] = None,
    policy: RulesFile = None,
) -> None:
    """Open MLflow's pages of the comparison: the winner first, charts, the decision page.

    Where MLFLOW_TRACKING_URI is a server its links are printed. Else MLflow's UI is started on the
    workspace's database, on 127.0.0.1 only, until Ctrl-C.
    """
    workspace = _workspace(policy)
    show_ui(workspace, workspace.scorecard(run) if run else None, port, out)


@app.command("approve")
def approve_command(  # noqa: PLR0913 - one argument for each option
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
    as_json: JsonFlag = False,
) -> None:
    """Approve the winner of a scorecard. Binds to that digest, and expires."""
    workspace = _workspace(policy)
    given = _approve.PersonAnswer("approve", approver, reason, candidate, accept_inconclusive)
    with printing(as_json=as_json) as output:
        _approve.decide_scorecard(workspace.scorecard(run), given, policy, workspace, output)


@app.command("reject")
def reject_command(
    run: RunName,
    reason: Annotated[str, typer.Option(help="why; kept in the workspace")],
    approver: Approver,
    policy: RulesFile = None,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Reject a scorecard: it cannot be promoted unless somebody approves it later."""
    workspace = _workspace(policy)
    given = _approve.PersonAnswer("reject", approver, reason)
    with printing(as_json=as_json) as output:
        _approve.decide_scorecard(workspace.scorecard(run), given, policy, workspace, output)


@app.command("promote")
def promote_command(policy: PolicyFile, run: RunName, *, as_json: JsonFlag = False) -> None:
    """Publish the winner of an approved scorecard into the live repository; it is proved live."""
    with printing(as_json=as_json) as output:
        output.document(_release.promote_live(policy, run, output.console))


@app.command("rollback")
def rollback_command(
    policy: PolicyFile,
    to: Annotated[int | None, typer.Option(help="release number; default: the one before")] = None,
    reason: Annotated[str, typer.Option(help="why; kept in the audit log")] = "",
    *,
    as_json: JsonFlag = False,
) -> None:
    """Make an earlier release live again, proved like a promotion. Needs folder and server only."""
    with printing(as_json=as_json) as output:
        output.document(_release.roll_back_live(policy, to, reason, output.console))


@app.command("withdraw")
def withdraw_command(
    policy: PolicyFile,
    reason: Annotated[str, typer.Option(help="why; kept in the audit log")],
    approver: Annotated[
        str,
        typer.Option("--approver", "--name", help="who decides", default_factory=getpass.getuser),
    ],
    *,
    as_json: JsonFlag = False,
) -> None:
    """Unload a first release, with no earlier one to roll back to: nothing is live afterwards."""
    with printing(as_json=as_json) as output:
        _release.withdraw_live(policy, approver, reason, output)


@app.command("audit")
def audit_command(
    policy: PolicyFile,
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="one event a line on stdout; its fields: docs/json.md")
    ] = False,
) -> None:
    """Show who did what, when and why; verify that nothing was changed or removed."""
    with printing(as_json=as_json) as output:
        holds = _live.print_audit(read_policy(policy), output)
    if not holds:
        raise typer.Exit(ExitCode.GATES_FAILED)


@app.command("status")
def status_command(
    policies: PolicyFiles = None,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Show each model's live release, its digest and history, and what waits for a decision."""
    paths = policies_of(policies)
    brief = len(paths) > _status.MOST_IN_FULL
    with printing(as_json=as_json) as output:
        found = _status.status_of(
            paths,
            shown=lambda each: _status.print_status(each, output.console, brief=brief),
            refused=_print_error,
        )
        if brief:
            print_hanging(output.console, "One model in full: enginegate status POLICY")
        output.document(found.document)
    raise typer.Exit(found.errors[0].exit_code if found.errors else ExitCode.OK)


@app.command("verify")
def verify_command(
    policies: PolicyFiles = None,
    *,
    repair: Annotated[
        bool, typer.Option("--repair", help="finish or undo what was cut short")
    ] = False,
    whole: Annotated[
        bool,
        typer.Option("--all", help="read every byte, also of what has not changed since last time"),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Recompute the digests of the live repository, and prove what its server serves.

    Files that have not changed since they were verified here are not read again, for seven days at
    most; --all reads every byte. Needs no right to write.

    Ends with 3 if something is not as it was published, with 5 if something could not be found out:
    a server that should answer does not, or a file may not be read.
    """
    ends: list[ExitCode] = []
    found: list[VerifiedRepository] = []
    together: dict[tuple[object, ...], list[tuple[Path, Policy]]] = {}

    def open_policy(path: Path) -> None:
        rules = read_policy(path)
        together.setdefault(_live.checked_together(rules), []).append((path, rules))

    def check(path: Path) -> None:
        same = next(each for each in together.values() if each[0][0] == path)
        checked = _live.verified(same[0][1], path, repair=repair, whole=whole)
        also = tuple(str(other) for other, _ in same[1:])
        found.append(checked.model_copy(update={"also": also}))
        ends.append(_live.print_verified(found[-1], output.console))

    with printing(as_json=as_json) as output:
        errors = _for_each(policies_of(policies), open_policy)
        errors += _for_each([same[0][0] for same in together.values()], check)
        words = tuple(str(error) for error in errors)
        output.document(VerifyDocument(repositories=tuple(found), errors=words))
    code = errors[0].exit_code if errors else ExitCode.OK
    for worst in (ExitCode.GATES_FAILED, code, ExitCode.COULD_NOT_FIND_OUT):
        if worst and worst in {*ends, code}:
            raise typer.Exit(worst)


app.command("watch")(_watch.watch_command)
app.command("acknowledge")(_watch.acknowledge_command)
app.command("automations")(_watch.automations_command)
app.command("scan")(_watch.scan_command)
app.command("deploy")(_deploy.deploy_command)


app.command("prune")(_prune.prune_command)
app.command("pull")(_release.pull_command)
app.command("call")(_call.call_command)
app.command("metrics")(_exporter.metrics_command)
app.command("backup")(_backup.backup_command)
app.command("restore")(_backup.restore_command)


@app.command("serve")
def serve_command(
    policy: PolicyFile,
    http_port: Annotated[int, typer.Option(min=0, max=LAST_PORT, help="0: any free port")] = 0,
    grpc_port: Annotated[int, typer.Option(min=0, max=LAST_PORT, help="0: any free port")] = 0,
) -> None:
    """Run Triton on a policy's live repository, on 127.0.0.1, until Ctrl-C."""
    ports = Ports(http=http_port, grpc=grpc_port)
    rules = read_policy(policy)
    _live.serve_live(rules, Workspace.of(rules), out, ports)


@app.command("demo")
def demo_command(
    answer: Annotated[
        Literal["yes", "no", "ask"], typer.Option("--approve", help="how the approval is answered")
    ] = "yes",
) -> None:
    """Run the whole path on real parts, without a GPU: train, qualify, promote, roll back.

    Everything is made below the current folder: .enginegate/ and policies/digits.toml.
    """
    Path(WORKSPACE).mkdir(exist_ok=True)  # so that this folder is the project, and none above it
    workspace = Workspace.here()
    # The demo leaves the user's own Prefect alone.
    home = workspace.root / "prefect"
    home.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("PREFECT_HOME", str(home))
    path = pipeline_module("examples.digits.demo")
    with interruptible(out):
        code = path.run(answer, workspace, out)
    raise typer.Exit(code)


def _workspace(policy: Path | None) -> Workspace:
    """The workspace of the policy that was named, else of the current folder."""
    return Workspace.of(read_policy(policy)) if policy is not None else Workspace.here()


def _ui_of(scorecard: Scorecard, policy: Path) -> str:
    """The command that shows it in MLflow; the policy is named where its workspace is elsewhere."""
    command = f"{START_COMMAND} {scorecard.digest[:12]}"
    there = _workspace(policy).root == Workspace.here().root
    return command if there else f"{command} --policy {shlex.quote(str(policy))}"


def _end_of_qualification(scorecard: Scorecard, *, strict: bool) -> ExitCode:
    outcomes = {scorecard.outcome(verdict.candidate) for verdict in scorecard.verdicts}
    if strict and Outcome.FAILED in outcomes:
        return ExitCode.GATES_FAILED
    return EXIT_CODES[qualification_outcome(scorecard)]


def _for_each(paths: Sequence[Path], do: Callable[[Path], None]) -> list[EnginegateError]:
    """Call ``do`` for every policy; those that cannot be read are reported, returned, left out."""
    errors = []
    for path in paths:
        try:
            do(path)
        except EnginegateError as error:
            errors.append(error)
            _print_error(error)
    return errors


def _print_error(error: EnginegateError) -> None:
    _print_message(_kind(error), str(error))


def _print_message(kind: str, message: str) -> None:
    """A message on the error output: between words on a terminal, in its own lines elsewhere."""
    text = Text.assemble((kind, "bold red"), ": ", message)
    if err.is_terminal:
        print_hanging(err, text)
    else:
        err.print(as_text(text), soft_wrap=True)


def _kind(error: EnginegateError) -> str:
    return error.exit_code.name.replace("_", " ").capitalize()
