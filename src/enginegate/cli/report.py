"""A scorecard as one page to read, to send or to print."""

from contextlib import suppress
from pathlib import Path

from rich.console import Console

from enginegate.atomic_io import write_file
from enginegate.cli.policies import policies_here
from enginegate.errors import EnginegateError, InputError
from enginegate.evidence import Scorecard
from enginegate.messages import short_number
from enginegate.policy import Policy, read_policy
from enginegate.report import PageHistory, decision_page, history_of
from enginegate.report.tables import print_hanging
from enginegate.repository.store.scorecard_history import ScorecardHistory
from enginegate.workspace import Workspace


def write_report(
    scorecard: Scorecard, policy: Path | None, output: Path, workspace: Workspace, out: Console
) -> None:
    """Write the page, with what the policy's live repository knows of the scorecard since.

    Args:
        scorecard: what is shown.
        policy: of its model; None: the one of ``policies/`` that is of that model.
        output: the file, which is replaced.
        workspace: keeps decisions and checks.
        out: where it is said what was written.

    Raises:
        InputError: the file cannot be written.
        TamperedError: the audit log was changed.
    """
    rules = read_policy(policy) if policy else _policy_of(scorecard)
    page = decision_page(scorecard, _history(scorecard, rules, workspace)).encode()
    try:
        write_file(output, page)
    except OSError as error:
        raise InputError(
            f"{output} cannot be written: {error.strerror}. Name another file with -o."
        ) from error
    size = short_number(len(page) / 1024)
    print_hanging(out, f"{output}: {size} KiB, one file that needs no network.")
    if rules is None:
        print_hanging(
            out,
            f"What happened to it since is not on it: no policy of {scorecard.model} is in "
            "policies/. Name one with --policy.",
        )


def _history(scorecard: Scorecard, rules: Policy | None, workspace: Workspace) -> PageHistory:
    if rules is None:
        return PageHistory(known=False)
    found = ScorecardHistory.read(scorecard, rules.target.repository, workspace)
    return history_of(scorecard, found, rules.approval)


def _policy_of(scorecard: Scorecard) -> Policy | None:
    """The policy of ``policies/`` that is of the scorecard's model; those it was made under first.

    A policy that was changed since still names the repository in which it went live.
    """
    found = []
    for path in policies_here():
        with suppress(EnginegateError):
            policy = read_policy(path)
            if policy.name == scorecard.model:
                found.append(policy)
    made_under = (p for p in found if _made_under(p, scorecard))
    return next(made_under, found[0] if found else None)


def _made_under(policy: Policy, scorecard: Scorecard) -> bool:
    return policy.with_model(scorecard.model_uri).digest == scorecard.policy_sha256
