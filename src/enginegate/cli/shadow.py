"""Samples of live traffic on the command line."""

from pathlib import Path
from typing import Annotated

import typer

from enginegate.cli.output.json_output import JsonFlag, Printer, printing
from enginegate.cli.output.records import SampleDocument
from enginegate.cli.policies import PolicyFile
from enginegate.errors import InputError
from enginegate.policy import Policy, read_policy
from enginegate.policy.hooks import importable_from
from enginegate.policy.recording import Shadow
from enginegate.report.tables import print_hanging
from enginegate.shadow import SampleInfo, import_sample, record_live, sample_info
from enginegate.triton.endpoint import live_addresses
from enginegate.triton.server import connect
from enginegate.workspace import Workspace

shadow_app = typer.Typer(
    help="Record, import and describe samples of live traffic (docs/shadow.md).",
    no_args_is_help=True,
)


@shadow_app.command("record")
def record_command(
    policy: PolicyFile,
    endpoint: Annotated[
        str | None, typer.Option(help="gRPC HOST:PORT; default: the policy's live server")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="listen at most this long")] = 60.0,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Record live requests through Triton's trace extension; its settings are restored."""
    rules = _read(policy)
    server = connect(endpoint or _live_endpoint(rules))
    home = Workspace.of(rules).shadow
    with printing(as_json=as_json) as output:
        _print_stored(
            *record_live(server, rules.name, _wanted(rules), home=home, duration_s=seconds), output
        )


@shadow_app.command("import")
def import_command(
    policy: PolicyFile,
    source: Annotated[Path, typer.Argument(help=".parquet, .npz, or a folder of .npy")],
    shape: Annotated[
        list[str] | None, typer.Option(help="of one row, e.g. input.image=1,8,8; may repeat")
    ] = None,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Import a sample that another system recorded, redacted and sliced as the policy says."""
    rules = _read(policy)
    shapes = dict(_shape(text) for text in shape or ())
    home = Workspace.of(rules).shadow
    with printing(as_json=as_json) as output:
        taken = import_sample(source, rules.name, _wanted(rules), home=home, shapes=shapes or None)
        _print_stored(*taken, output)


@shadow_app.command("info")
def info_command(
    sample: Annotated[Path, typer.Argument(help="a sample's folder")],
    *,
    as_json: JsonFlag = False,
) -> None:
    """Describe a sample; nothing that users sent is shown."""
    with printing(as_json=as_json) as output:
        _print_sample(sample, sample_info(sample), output)


def _print_stored(path: Path, found: SampleInfo, output: Printer) -> None:
    _print_sample(path, found, output)
    print_hanging(output.console, f"Stored in {path}. Name it in the policy: [data] shadow.")


def _print_sample(path: Path, found: SampleInfo, output: Printer) -> None:
    lines = found.lines()
    width = max(len(heading) for heading, _ in lines)
    for heading, text in lines:
        print_hanging(output.console, text, f"{heading:<{width}}  ")
    output.document(SampleDocument(folder=str(path), sample=found))


def _read(policy: Path) -> Policy:
    """A policy whose own functions can be imported from its project and the current folder."""
    rules = read_policy(policy)
    for folder in (rules.root, Path.cwd()):
        if folder is not None:
            importable_from(folder)
    return rules


def _wanted(rules: Policy) -> Shadow:
    return rules.shadow or Shadow()


def _live_endpoint(rules: Policy) -> str:
    addresses = live_addresses(rules.target)
    if addresses is None:
        raise InputError(
            f"No live server of {rules.target.repository} is known. Give --endpoint HOST:PORT, or "
            "name it in the policy: [target] endpoint."
        )
    return addresses.grpc


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, axes = text.partition("=")
    shape = [int(axis) if axis.strip().isdecimal() else 0 for axis in axes.split(",")]
    if not name or 0 in shape:
        raise InputError(
            f"{text!r} is not a shape. Write COLUMN=AXIS,AXIS, for example input.image=1,8,8."
        )
    return name, tuple(shape)
