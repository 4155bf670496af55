"""Where the time of a request goes at the chosen point."""

from dataclasses import dataclass

from enginegate.evidence import Scorecard


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """The parts of a request's time."""


def time_spent_section(scorecard: Scorecard) -> TimeSpent | None:
    """The content of ``time_spent.html``; None: there is nothing to show."""
    return None if scorecard.winner is None else TimeSpent()
