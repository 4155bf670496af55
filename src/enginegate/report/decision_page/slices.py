"""Slices of the data against candidates: where an engine loses more than on the whole."""

from dataclasses import dataclass

from enginegate.evidence import Scorecard


@dataclass(frozen=True, slots=True)
class SliceMap:
    """Slices in rows, candidates in columns."""


def slices_section(scorecard: Scorecard) -> SliceMap | None:
    """The content of ``slices.html``; None: there is nothing to show."""
    return None if scorecard.winner is None else SliceMap()
