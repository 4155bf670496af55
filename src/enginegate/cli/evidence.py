"""Evidence of one kind of device: made here by `qualify --device`, and carried between machines."""

from pathlib import Path
from typing import Annotated

import typer

from enginegate.candidate import FileDigest
from enginegate.cli.output.json_output import JsonFlag, printing
from enginegate.cli.output.live_table import qualification_shown
from enginegate.cli.output.records import BundleDocument
from enginegate.cli.output.scorecard_document import part_document
from enginegate.devices import DeviceQualification, PartStore, read_bundle, write_bundle
from enginegate.errors import InputError
from enginegate.evidence import Scorecard
from enginegate.pipeline import pipeline_module
from enginegate.policy import Policy
from enginegate.report import print_scorecard
from enginegate.workspace import Workspace

evidence_app = typer.Typer(no_args_is_help=True, help="Evidence from other machines: in and out.")


def qualify_device_here(rules: Policy, policy: Path, device: str, *, as_json: bool) -> None:
    """Make the part of one kind of device on this machine; no worker and no server is asked.

    Args:
        rules: the whole policy, for one version of the model.
        policy: its file.
        device: the kind of device that this machine has.
        as_json: print a document instead of sentences.

    Raises:
        PolicyError: the policy names no such kind.
    """
    asked = rules.for_device(device)
    commands = (
        f"enginegate qualify {policy}",
        f"enginegate evidence export FILE --device {device}",
    )
    with printing(as_json=as_json) as output:
        flow = pipeline_module("flows.qualify_device")
        with qualification_shown(asked):
            part: DeviceQualification = flow.qualify_device(policy, device, rules.model.uri)
        print_scorecard(part.shown(), output.console)
        for word, command in zip(("Next:", "or, for another machine:"), commands, strict=True):
            output.console.print(f"{word} {command}", markup=False, soft_wrap=True)
        output.document(part_document(part, commands))


def seen_on(card: Scorecard, device: str | None) -> Scorecard:
    """What a scorecard says of one kind of device; None: all of it.

    Raises:
        InputError: it is not about that kind.
    """
    if device is None:
        return card
    if device not in card.devices:
        known = ", ".join(card.devices) or "none is named"
        raise InputError(
            f"Scorecard {card.digest[:12]} is not about {device!r}; its kinds of device: {known}."
        )
    return card.on(device)


@evidence_app.command("export")
def export_evidence(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="archive to write")],
    device: Annotated[str, typer.Option(help="kind of device, as the policy names it")],
    model: Annotated[str, typer.Option(help="which model, where there are several")] = "",
    *,
    as_json: JsonFlag = False,
) -> None:
    """Write what was found out on this machine's device, engines included, into one file.

    Carry it to the machine that qualifies, and import it there.
    """
    workspace = Workspace.here()
    part = PartStore(workspace).newest(device, model)
    digest = write_bundle(part, workspace, file)
    with printing(as_json=as_json) as output:
        size = digest.size_bytes / 2**20
        output.console.print(
            f"{file}: {part.identity.model_uri} on {device}, {size:.1f} MiB, sha256 "
            f"{digest.sha256}",
            markup=False,
            soft_wrap=True,
        )
        command = f"enginegate evidence import {file.name} --sha256 {digest.sha256[:16]}"
        output.console.print(f"There: {command}", markup=False, soft_wrap=True)
        output.document(_bundle_document(part, file, digest))


@evidence_app.command("import")
def import_evidence(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="archive that export wrote")],
    sha256: Annotated[
        str, typer.Option(help="what the archive's digest must begin with, as export printed it")
    ] = "",
    *,
    as_json: JsonFlag = False,
) -> None:
    """Bring evidence from another machine in; the digest of every file of it is checked.

    `qualify` uses it for that kind of device where policy, model and data are the same.
    """
    workspace = Workspace.here()
    part = read_bundle(file, workspace, sha256=sha256)
    with printing(as_json=as_json) as output:
        identity = part.identity
        said = f"{identity.model_uri} on {part.device}, made at {part.made_at:%Y-%m-%d %H:%M} by "
        output.console.print(
            f"{said}{part.made_by}, under policy {identity.policy_sha256[:12]}: winner "
            f"{part.evidence.winner or 'none'}",
            markup=False,
            soft_wrap=True,
        )
        output.console.print("Next: enginegate qualify POLICY", markup=False, soft_wrap=True)
        output.document(_bundle_document(part, file, FileDigest.of(file)))


def _bundle_document(part: DeviceQualification, file: Path, digest: FileDigest) -> BundleDocument:
    return BundleDocument(
        file=str(file.absolute()),
        sha256=digest.sha256,
        part=part.identity.digest,
        device=part.device,
        model_uri=part.identity.model_uri,
        policy_sha256=part.identity.policy_sha256,
        winner=part.evidence.winner.name if part.evidence.winner else None,
    )
