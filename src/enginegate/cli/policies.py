"""Policies on the terminal: which ones are meant, and what one asks for."""

from pathlib import Path

from rich.console import Console

from enginegate.errors import InputError
from enginegate.policy import Policy
from enginegate.wording import counted


def policies_of(given: list[Path] | None) -> list[Path]:
    """Those that were named, else all of this checkout.

    Raises:
        InputError: there is none.
    """
    found = given or sorted(Path("policies").glob("*.toml"))
    if not found:
        raise InputError(
            f"{Path.cwd()} has no policies/*.toml. Name a policy, or change into your checkout."
        )
    return found


def print_policy(policy: Policy, out: Console) -> None:
    """What it promotes, from where to where, and what it asks for."""
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
