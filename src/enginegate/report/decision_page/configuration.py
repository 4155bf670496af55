"""The chosen configuration, line by line with the measurement that chose it; host and versions.

From the scorecard alone, so that the page can be made where the engine's files are not.
"""

from dataclasses import dataclass

from enginegate.evidence import Scorecard


@dataclass(frozen=True, slots=True)
class ChosenConfiguration:
    """Lines of the configuration, and the machine."""


def configuration_section(scorecard: Scorecard) -> ChosenConfiguration | None:
    """The content of ``configuration.html``; None: there is nothing to show."""
    return None if scorecard.winner is None else ChosenConfiguration()
