"""One kind of device's part of a qualification, on a machine that has such a device."""

from pathlib import Path

from prefect import flow

from enginegate.devices import DeviceQualification
from enginegate.policy import Policy, read_policy
from enginegate.retention import marked_as_running
from enginegate.workspace import Workspace
from flows.qualify import collect_evidence, identify_part
from flows.run_names import device_run_name, qualification_title
from tasks.build import check, export, resolve_version
from tasks.devices import check_device, find_part, keep_part, push_to_store
from tasks.record import make_scorecard
from tasks.run_page import rename_run


@flow(
    name="qualify-device",
    flow_run_name=device_run_name,
    persist_result=False,
    validate_parameters=False,
)
def qualify_device(policy: Path, device: str, model_uri: str | None = None) -> DeviceQualification:
    """Build, judge and benchmark every candidate on this machine, for one kind of device.

    The part is kept in the workspace, where `qualify` gathers it; one that is there is not made
    again. Each engine, verdict and measurement is kept as soon as it is made, so that a run that
    takes over from a killed one continues where that was.

    Args:
        policy: the model family's policy file.
        device: which of its kinds of device this machine has.
        model_uri: another registry version than the policy's ``model.uri``.

    Raises:
        PolicyError: the policy names no such kind.
        EnginegateError: this machine has no such device.
    """
    origin = Path(policy)
    opened = read_policy(origin)
    if model_uri:
        opened = opened.with_model(model_uri)
    workspace = Workspace.of(opened)
    opened.for_device(device)  # refuses a kind that the policy does not name
    check_device(device, opened.devices[device])
    resolved = opened.with_model(resolve_version(opened.model, workspace))
    rename_run(f"{qualification_title(resolved.name, resolved.model.uri)} on {device}")
    with marked_as_running(workspace, "qualify-device"):
        return _part_of(resolved, device, origin, workspace)


def _part_of(
    resolved: Policy, device: str, origin: Path, workspace: Workspace
) -> DeviceQualification:
    asked = resolved.for_device(device)
    check(asked, origin, workspace, pinned=True)
    source = export(asked.model, asked.data.evaluation, workspace)
    identity = identify_part(resolved, device, source)
    store = resolved.devices[device].store
    before = find_part(identity, workspace, store)
    if before is not None:
        if store is not None:
            push_to_store(before, workspace, store)
        return before
    found = collect_evidence(asked, source, workspace)
    card = make_scorecard(
        found, asked.slo, asked.search, asked.target.repository, workspace, device
    )
    part = keep_part(
        identity, card, found.attempts, found.results, asked.data.evaluation, workspace
    )
    if store is not None:
        push_to_store(part, workspace, store)
    return part
