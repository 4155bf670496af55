"""`qualify --device`: the part of a qualification that one kind of device can make."""

from pathlib import Path

from enginegate.cli.output.json_output import printing
from enginegate.cli.output.live_table import qualification_shown
from enginegate.cli.output.scorecard_document import part_document
from enginegate.devices import DeviceQualification
from enginegate.pipeline import pipeline_module
from enginegate.policy import Policy
from enginegate.report import print_scorecard


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
