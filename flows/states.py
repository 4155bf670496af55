"""How a flow ended, as Prefect's pages name it: `Inconclusive`, `Broken promise`, …

A flow that ends in a state hands its caller the state's data: a result is returned and an error is
raised as if there were no state. Prefect's own event of the end carries the name, so an automation
that waits for a flow to end lists the names that the flow can end in.
"""

from typing import TypeVar, cast

from prefect.states import Completed, Failed

from enginegate.errors import ApprovalError, EnginegateError, RejectedError, ServerError
from enginegate.evidence import Outcome, Scorecard
from enginegate.watch.log import PromiseBrokenError, WatchResult

R = TypeVar("R")

COMPLETED, FAILED = "Completed", "Failed"
INCONCLUSIVE = "Inconclusive"
NOTHING_PASSED = "Nothing passed"
NOTHING_LIVE = "Nothing live"
ALREADY_LIVE = "Already live"
PROMISE_RENEWED = "Promise renewed"
BROKEN_PROMISE = "Broken promise"
NOT_MEASURED = "Not measured"
REJECTED = "Rejected"
NOT_APPROVED = "Not approved"
# Every name that a run of `watch` that ended can have; automations/watch-silent.yaml lists them.
ENDS_OF_WATCH = (
    COMPLETED,
    FAILED,
    BROKEN_PROMISE,
    NOT_MEASURED,
    INCONCLUSIVE,
    NOTHING_LIVE,
)


def completed_as(name: str, result: R, message: str) -> R:
    """End the flow well, under a name; whoever called the flow gets ``result``."""
    return cast("R", Completed(name=name, message=message, data=result))


def failed_as(name: str, error: EnginegateError, result: type[R]) -> R:
    """End the flow as failed, under a name; whoever called the flow gets ``error`` raised.

    Args:
        name: of the state.
        error: its text is the state's message.
        result: the flow's type of result, which it does not have.
    """
    del result  # it types what the flow returns
    return cast("R", Failed(name=name, message=str(error), data=error))


def end_of_qualification(card: Scorecard) -> tuple[str, str]:
    """Name and message of how a qualification ended."""
    if card.winner is not None:
        return COMPLETED, f"winner {card.winner}: {card.reason}"
    outcomes = [card.outcome(verdict.candidate) for verdict in card.verdicts]
    is_open = min(outcomes, default=Outcome.INCONCLUSIVE) is Outcome.INCONCLUSIVE
    return INCONCLUSIVE if is_open else NOTHING_PASSED, f"no winner: {card.reason}"


def end_of_watch(watched: WatchResult) -> tuple[str, str]:
    """Name and message of how a watch ended that found no fault."""
    if not watched.checks:
        return NOTHING_LIVE, "nothing is live, or it is being rolled out"
    newest = watched.checks[-1]
    is_open = newest.outcome is Outcome.INCONCLUSIVE
    return INCONCLUSIVE if is_open else COMPLETED, str(newest)


def end_of_failed_watch(error: EnginegateError) -> str:
    """Name of how a watch ended that found a fault."""
    if isinstance(error, PromiseBrokenError):
        return BROKEN_PROMISE
    return NOT_MEASURED if isinstance(error, ServerError) else FAILED


def end_of_refusal(error: EnginegateError) -> str:
    """Name of how a promotion ended that was not published for want of a valid approval."""
    if isinstance(error, RejectedError):
        return REJECTED
    return NOT_APPROVED if isinstance(error, ApprovalError) else FAILED
