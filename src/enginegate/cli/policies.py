"""Policies on the terminal: which ones are meant, and what one asks for."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from enginegate.cli.output.json_output import Printer
from enginegate.cli.output.records import OpenCandidate, PolicyDocument
from enginegate.errors import InputError
from enginegate.messages import counted
from enginegate.policy import Policy
from enginegate.policy.paths import project_of
from enginegate.preflight import check_policy
from enginegate.report.tables import print_hanging

PolicyFile = Annotated[
    Path, typer.Argument(help="the model family's policy, e.g. policies/digits.toml")
]

PolicyFiles = Annotated[list[Path] | None, typer.Argument(metavar="[POLICY]…")]


def policies_of(given: list[Path] | None) -> list[Path]:
    """Those that were named, else all of the current folder's project.

    Raises:
        InputError: there is none.
    """
    found = given or policies_here()
    if not found:
        raise InputError(
            f"{project_of(Path.cwd())} has no policies/*.toml. Name a policy, or change into the "
            "folder of your project."
        )
    return found


def policies_here() -> list[Path]:
    """All policies of the current folder's project."""
    return sorted((project_of(Path.cwd()) / "policies").glob("*.toml"))


def print_check(policy: Policy, origin: Path, output: Printer) -> None:
    """Print what a policy asks for, check that it is here, and print what will be inconclusive.

    Raises:
        PolicyError: something that it names is not there.
    """
    out = output.console
    _print_policy(policy, out)
    found = check_policy(policy)
    found.refuse(origin)
    will_be = [f"{c}: {o.why}. {o.remedy}" for c, o in found.undecidable.items()]
    for sentence in (*will_be, *found.notes):
        print_hanging(out, sentence, Text("inconclusive ", style="yellow"))
    out.print()
    print_hanging(out, f"{origin} is valid.")
    out.print(f"Next: enginegate qualify {origin}", markup=False, soft_wrap=True)
    output.document(
        PolicyDocument(
            policy=str(origin),
            model=policy.name,
            model_uri=policy.model.uri,
            repository=str(policy.target.repository),
            candidates=tuple(str(candidate) for candidate in policy.candidates.all()),
            slo_p99_ms=policy.slo.p99_ms,
            slo_min_throughput_per_s=policy.slo.min_throughput_per_s,
            slo_confidence=policy.slo.confidence,
            policy_sha256=policy.digest,
            inconclusive=tuple(
                OpenCandidate(candidate=str(c), why=o.why, remedy=o.remedy)
                for c, o in found.undecidable.items()
            ),
            notes=tuple(found.notes),
        )
    )


def _print_policy(policy: Policy, out: Console) -> None:
    """Print model, candidates, SLO, search budget and digest."""
    search, slo = policy.search, policy.slo
    promised = (
        f"p99 <= {slo.p99_ms:g} ms at {slo.min_throughput_per_s:g} requests/s or more, with "
        f"{slo.confidence:.0%} confidence"
    )
    facts = (
        ("model", f"{policy.model.uri} -> {policy.name} in {policy.target.repository}"),
        ("candidates", ", ".join(str(candidate) for candidate in policy.candidates.all())),
        (
            "SLO",
            promised,
        ),
        (
            "search",
            f"{counted(search.configurations, 'configuration')}, {search.budget_s:g} s a candidate",
        ),
        ("digest", policy.digest),
    )
    for name, text in facts:
        print_hanging(out, text, f"{name:<10}  ")
