"""[devices]: the kinds of device that releases are served on, and who has one of each.

An engine belongs to one kind of device, and so does everything that is known about it. A policy
that names no kind is about the machine that `qualify` runs on.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, StringConstraints

from enginegate.candidate import Candidate, EngineKindName
from enginegate.errors import ModelError
from enginegate.messages import matching
from enginegate.policy.building import MadeElsewhere
from enginegate.policy.operating import Ensemble, ObjectUrl, PromotionTarget
from enginegate.records import Record

DeviceName = Annotated[
    str,
    matching(r"^[a-z0-9][a-z0-9-]{0,39}$", "lower-case letters, digits and '-', at most 40"),
]
# Prices differ between devices, and so do rates worth trying; what must be proved does not.
_MAY_DIFFER = frozenset({"cost", "search"})
# `cpu` and `gpu` stand in releases of policies without [devices].
_TAKEN = frozenset({"cpu", "gpu"})


class DeviceKind(Record):
    """One kind of device: whose workers have it, and what of the policy differs there."""

    pool: Annotated[str, StringConstraints(max_length=100)] = Field(
        default="",
        description="Prefect work pool whose workers have such a device; none: its evidence is "
        "brought by `enginegate evidence import`",
    )
    gpu: str = Field(
        default="",
        description='whole words of the name of its GPU, as nvidia-smi has it, e.g. "L4", which '
        "is no L40S: a worker whose first GPU has another name is refused; none: nothing is "
        "checked",
    )
    candidates: tuple[str, ...] = Field(
        default=(), description="of [candidates], as KIND-PRECISION, those for it; none: all"
    )
    tables: dict[str, dict[str, Any]] = Field(
        default={},
        description="keys of [cost], [search] and the engine kinds' tables that differ on it, e.g. "
        "[devices.l4.tables.cost]",
    )
    store: ObjectUrl | None = Field(
        default=None,
        description="object storage that its workers leave their part in, engines included; none: "
        "they share this host's workspace folder",
    )
    wait_hours: PositiveFloat = Field(
        default=24.0, description="how long its part of a qualification may take, queue included"
    )


def overlaid(
    raw: Mapping[str, Any], name: str, kind: DeviceKind, engine_kinds: Sequence[EngineKindName]
) -> dict[str, Any]:
    """The tables of a policy as they are on one kind of device; that policy names no kinds.

    Args:
        raw: the policy's tables.
        name: of the kind of device.
        kind: what differs there.
        engine_kinds: names of the engine kinds.

    Raises:
        ValueError: a table may not differ, or a candidate is none of the policy's.
    """
    target = {**raw["target"], "device": ""}
    target["fleet"] = [{**server, "device": ""} for server in target.get("fleet", ())]
    found = {**raw, "devices": {}, "target": target}
    for table, values in kind.tables.items():
        if table not in _MAY_DIFFER | set(engine_kinds):
            allowed = ", ".join(sorted(_MAY_DIFFER | set(engine_kinds)))
            raise ValueError(
                f"devices.{name}.tables.{table} may not differ between kinds of device; these may: "
                f"{allowed}"
            )
        found[table] = {**found[table], **values}
    if kind.candidates:
        found["candidates"] = _chosen(raw["candidates"], name, kind.candidates)
    return found


def _chosen(listed: Mapping[str, Any], name: str, wanted: Sequence[str]) -> dict[str, list[Any]]:
    made = {MadeElsewhere.model_validate(table).candidate: table for table in listed["made"]}
    chosen: dict[str, list[Any]] = {}
    for each in wanted:
        try:
            candidate = Candidate.parse(each)
        except ModelError as error:
            raise ValueError(f"devices.{name}.candidates: {error}") from error
        if candidate in made:
            chosen.setdefault("made", []).append(made[candidate])
            continue
        if candidate.variant or candidate.precision not in listed.get(candidate.kind, ()):
            raise ValueError(
                f"devices.{name}.candidates names {each!r}, which [candidates] does not list"
            )
        chosen.setdefault(candidate.kind, []).append(str(candidate.precision))
    return chosen


def check_devices(
    devices: Mapping[str, DeviceKind], target: PromotionTarget, ensemble: Ensemble | None
) -> None:
    """Refuse servers of kinds that are not named, and what several kinds cannot share.

    Raises:
        ValueError: names the server, or the key.
    """
    for line in _problems(devices, target, ensemble):
        raise ValueError(line)


def _problems(
    devices: Mapping[str, DeviceKind], target: PromotionTarget, ensemble: Ensemble | None
) -> Iterator[str]:
    servers = {f"fleet server {server.name!r}": server.device for server in target.fleet}
    named = {"target": target.device, **servers}
    for who, device in named.items():
        if device and device not in devices:
            known = ", ".join(devices) or "none: there is no [devices] table"
            yield f"the {who} has device {device!r}, which [devices] does not name (it has {known})"
    if not devices:
        return
    for taken in _TAKEN & set(devices):
        yield f"devices.{taken}: that name stands for any such device. Name the kind, e.g. l4"
    if ensemble is not None:
        yield "[ensemble] and [devices] do not go together yet: publish the steps as models"
    own = device_of(target, devices)
    for server in target.fleet:
        if server.device and server.device != own and server.repository is None:
            yield (
                f"fleet server {server.name!r} has another kind of device ({server.device}) than "
                f"the target ({own}), so it needs a repository of its own: set its `repository`"
            )


def device_of(target: PromotionTarget, devices: Mapping[str, DeviceKind]) -> str:
    """The kind of device of the target's own server: the one it names, else the first."""
    return target.device or next(iter(devices), "")


def in_order(target: PromotionTarget, devices: Mapping[str, DeviceKind]) -> tuple[str, ...]:
    """Every kind of device, that of the target's own server first."""
    own = device_of(target, devices)
    return (own, *(name for name in devices if name != own)) if devices else ()
