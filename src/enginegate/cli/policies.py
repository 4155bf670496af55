"""Policies on the terminal: which ones are meant, and what one asks for."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from enginegate.errors import InputError
from enginegate.messages import counted
from enginegate.policy import Policy
from enginegate.policy.paths import project_of
from enginegate.preflight import check_policy

PolicyFile = Annotated[
    Path, typer.Argument(help="the model family's policy, e.g. policies/digits.toml")
]


def policies_of(given: list[Path] | None) -> list[Path]:
    """Those that were named, else all of the current folder's project.

    Raises:
        InputError: there is none.
    """
    found = given or policies_here()
    if not found:
        raise InputError(
            f"{project_of(Path.cwd())} has no policies/*.toml. Name a policy, or change into your "
            "checkout."
        )
    return found


def policies_here() -> list[Path]:
    """All policies of the current folder's project."""
    return sorted((project_of(Path.cwd()) / "policies").glob("*.toml"))


def print_check(policy: Policy, origin: Path, out: Console) -> None:
    """Check that everything the policy names is here, and print what will be inconclusive.

    Raises:
        PolicyError: something that it names is not there.
    """
    found = check_policy(policy)
    found.refuse(origin)
    will_be = [f"{c}: {o.why}. {o.remedy}" for c, o in found.undecidable.items()]
    for sentence in (*will_be, *found.notes):
        out.print("[yellow]inconclusive[/] ", end="")
        out.print(sentence, markup=False, soft_wrap=True)


def print_policy(policy: Policy, out: Console) -> None:
    """Print model, candidates, SLO, search budget and digest."""
    names = ", ".join(str(candidate) for candidate in policy.candidates.all())
    search = policy.search
    out.print(f"model       {policy.model.uri} -> {policy.name} in {policy.target.repository}")
    out.print(f"candidates  {names}")
    out.print(
        f"SLO         p99 <= {policy.slo.p99_ms:g} ms at {policy.slo.min_throughput_per_s:g} "
        f"requests/s or more, with {policy.slo.confidence:.0%} confidence"
    )
    out.print(
        f"search      {counted(search.configurations, 'configuration')}, {search.budget_s:g} "
        "s a candidate"
    )
    out.print(f"digest      {policy.digest}")
