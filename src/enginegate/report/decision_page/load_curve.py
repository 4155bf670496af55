"""Latency against throughput, as it was measured, with the chosen point."""

from dataclasses import dataclass

from enginegate.evidence import Scorecard


@dataclass(frozen=True, slots=True)
class LoadCurve:
    """The chart and its text alternative."""


def load_curve_section(scorecard: Scorecard) -> LoadCurve | None:
    """The content of ``load_curve.html``; None: there is nothing to show."""
    return None if scorecard.winner is None else LoadCurve()
