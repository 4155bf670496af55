"""Which parts are here, what a missing part costs, and how to get it."""

import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from enginegate.cli.live.notify import found_receivers
from enginegate.cli.output.json_output import Printer
from enginegate.cli.output.records import (
    CheckedPromise,
    DoctorDocument,
    InstalledPart,
    ServerCheck,
    UpgradeProblem,
)
from enginegate.contract.server_contract import ContractCheck, check_contract
from enginegate.contract.server_versions import ServerVersions, read_versions
from enginegate.engine_kinds import native_backends
from enginegate.engines import availability
from enginegate.errors import EnginegateError, ServerError
from enginegate.evidence import Outcome
from enginegate.loadgen.perf_analyzer import find_perf_analyzer
from enginegate.machine import gpus
from enginegate.notifications import receivers_of_environment
from enginegate.report.tables import FittedTable, TableColumn, print_hanging
from enginegate.repository import Layout, models
from enginegate.repository.deploy.upgrades import UpgradeFinding, find_upgrades, live_engines
from enginegate.triton.backends import server_backends
from enginegate.triton.endpoint import LiveAddresses
from enginegate.triton.install import find_triton
from enginegate.triton.server import Server, connect


class DoctorPart(NamedTuple):
    """One thing the pipeline can use."""

    name: str
    found: str
    cost: str
    remedy: str


_PACKAGES = (
    ("prefect", "flows do not run", "pip install enginegate"),
    ("mlflow", "no registry, nothing is recorded", "pip install enginegate"),
    ("great-expectations", "nothing is judged", "pip install enginegate"),
    ("tritonclient", "no server can be talked to", "pip install 'enginegate[triton]'"),
    ("torch", "PyTorch models cannot be exported", "pip install 'enginegate[torch]'"),
)


def print_parts(output: Printer) -> None:
    """Print every part; what is missing, with what that costs and how to get it."""
    columns = ("part", "here", "without it", "how to get it")
    shown = FittedTable([TableColumn(name, heads=name == columns[0]) for name in columns])
    found = tuple(parts())
    for part in found:
        missing = not part.found
        shown.add_row(
            Text(part.name, style="bold"),
            Text(part.found) if part.found else Text("missing", style="bold red"),
            part.cost if missing else "",
            part.remedy if missing else "",
        )
    shown.print(output.console)
    listed = tuple(InstalledPart.model_validate(part._asdict()) for part in found)
    output.document(DoctorDocument(parts=listed))


def print_contract(address: str, repository: Path | None, output: Printer) -> Outcome:
    """Check on a running server what promotions rely on, and show the results.

    Returns:
        The worst of the checks.

    Raises:
        ServerError: nothing answers there, or it stopped answering.
    """
    server, out = connect(address), output.console
    print_hanging(out, f"Triton {server.version} at {address}; this takes about half a minute.")
    backends = _backend_words(server)
    print_hanging(out, backends)
    versions = read_versions(LiveAddresses(grpc=address))
    print_hanging(out, _version_words(versions))
    upgrades = _print_upgrades(versions, repository, out)
    checks = check_contract(address, repository=repository)
    _print_checks(checks, out)
    worst = max(check.outcome for check in checks)
    if any(finding.certain for finding in upgrades):
        worst = max(worst, Outcome.FAILED)
    _print_conclusion(worst, repository, out)
    output.document(
        DoctorDocument(
            server=ServerCheck(
                address=address,
                triton=server.version,
                backends=backends,
                versions=_version_words(versions),
                outcome=worst,
                checks=tuple(
                    CheckedPromise(promise=c.promise, outcome=c.outcome, reason=c.reason)
                    for c in checks
                ),
                upgrades=tuple(
                    UpgradeProblem(certain=found.certain, reason=found.words) for found in upgrades
                ),
            )
        )
    )
    return worst


def _print_conclusion(worst: Outcome, repository: Path | None, out: Console) -> None:
    if worst is Outcome.PASSED:
        print_hanging(out, "Releases can be promoted and rolled back on this server under load.")
    elif worst is Outcome.FAILED:
        refusal = ("Do not promote on this server under load", "bold red")
        instead = ": take it out of rotation first, or use another version of Triton."
        print_hanging(out, Text.assemble(refusal, instead))
    if repository is None and worst is not Outcome.INCONCLUSIVE:
        print_hanging(
            out,
            "Files travelled in the load call. With --repository PATH, the folder that this server "
            "reads, they are loaded as a promotion does it.",
        )


def _print_upgrades(
    versions: ServerVersions, repository: Path | None, out: Console
) -> tuple[UpgradeFinding, ...]:
    """Print what of a repository would not load with the TensorRT and driver that are there."""
    if repository is None:
        return ()
    engines = [
        each for name in models(repository) for each in live_engines(Layout(repository, name))
    ]
    found = tuple(find_upgrades(engines, versions, policy="POLICY"))
    for finding in found:
        print_hanging(out, Text(finding.words, style="bold red" if finding.certain else "yellow"))
    return found


def _version_words(versions: ServerVersions) -> str:
    said = []
    if versions.tensorrt:
        said.append(f"TensorRT {versions.tensorrt} is loaded there")
    elif versions.usual_tensorrt:
        usual = versions.usual_tensorrt
        said.append(f"images of Triton {versions.triton} had TensorRT {usual}, as far as is known")
    else:
        said.append("which TensorRT it has is not known: none is loaded, or it is another machine")
    if versions.installed_tensorrt and versions.installed_tensorrt != versions.tensorrt:
        said.append(f"{versions.installed_tensorrt} is installed, and loads when it starts again")
    if versions.driver:
        said.append(f"NVIDIA driver {versions.driver}")
    if versions.installed_driver and versions.installed_driver != versions.driver:
        said.append(f"of which {versions.installed_driver} is installed")
    return "; ".join(said)[:1].upper() + "; ".join(said)[1:] + "."


def _backend_words(server: Server) -> str:
    """Which of Triton's own backends a running server has for engines."""
    try:
        with server.client() as client:
            found = server_backends(client)
    except ServerError as error:
        return f"Which backends it has cannot be asked: {error}"
    missing = sorted(set(native_backends()) - set(found))
    words = f"Own backends for engines: {', '.join(found) or 'none'}"
    return f"{words}; it lacks {' and '.join(missing)}." if missing else f"{words}."


def _print_checks(checks: tuple[ContractCheck, ...], out: Console) -> None:
    """Print one row for each promise."""
    names = ("promise", "kept", "evidence")
    shown = FittedTable([TableColumn(name, heads=name != names[2]) for name in names])
    colours = {Outcome.PASSED: "green", Outcome.FAILED: "bold red"}
    for check in checks:
        kept = Text(check.outcome.word, style=colours.get(check.outcome, "yellow"))
        shown.add_row(check.promise, kept, check.reason)
    shown.print(out)


def parts() -> Iterator[DoctorPart]:
    """Every part, in the order of the pipeline."""
    yield _gpu()
    for kind in availability():
        uses = [w for w, can in (("builds", kind.can_build), ("runs", kind.can_run)) if can]
        found = f"{kind.library}: {' and '.join(uses) or 'unusable'}" if kind.library else ""
        note = f" ({kind.why_not})" if kind.why_not and found else ""
        yield DoctorPart(kind.kind, found + note, f"no {kind.kind} candidates", kind.remedy)
    yield _triton()
    yield DoctorPart(
        "perf_analyzer",
        str(find_perf_analyzer() or ""),
        "no second load generator to compare with",
        "pip install tritonclient==2.51.0, or name the program with PERF_ANALYZER",
    )
    yield _messages()
    for name, cost, remedy in _PACKAGES:
        yield DoctorPart(name, _version(name), cost, remedy)


def _messages() -> DoctorPart:
    cost = "nobody is told of approvals that wait, broken promises and errored watches"
    remedy = "set ENGINEGATE_NOTIFY to addresses of Apprise, then: enginegate notify test"
    try:
        # Prefect takes seconds to load, and has a server to ask where one is named.
        in_prefect = "PREFECT_API_URL" in os.environ
        found = found_receivers() if in_prefect else receivers_of_environment()
    except EnginegateError as error:
        return DoctorPart("messages", "", cost, f"{error}")
    named = f"{', '.join(found.labels)}, of {found.origin}" if found else ""
    return DoctorPart("messages", named, cost, remedy)


def _gpu() -> DoctorPart:
    cost = "engines for a GPU are built ahead of time at best, and stay inconclusive"
    return DoctorPart("GPU", gpus(), cost, "run on a machine with an NVIDIA GPU and its driver")


def _triton() -> DoctorPart:
    cost = "nothing can be benchmarked or served here"
    try:
        found = find_triton(None)
    except ServerError as error:
        return DoctorPart("Triton server", "", cost, str(error))
    names = ", ".join(found.backend_names())
    where = f" in {found.backends}" if names else ""
    backends = f"backends {names}{where}" if names else "its backends were not found"
    return DoctorPart("Triton server", f"{found.origin}; {backends}", cost, "")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
