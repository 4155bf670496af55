"""Where the mean time of a request goes: one stacked bar a row, on one scale."""

from collections.abc import Sequence
from typing import NamedTuple

from enginegate.charts.svg import PlotAxis, Svg, element, percent, plot

_HEIGHT = 22


class StageTime(NamedTuple):
    """One part of a request's time.

    Attributes:
        name: for people.
        number: of its fill, which is the part's in every bar.
        time_ms: mean of a request.
        share: of the whole.
    """

    name: str
    number: int
    time_ms: float
    share: float


def stage_bar(stages: Sequence[StageTime], longest_ms: float, label: str) -> Svg:
    """One bar; ``longest_ms`` is the whole of the longest one."""
    axis, start, parts = PlotAxis(0.0, longest_ms or 1.0), 0.0, []
    for stage in stages:
        end = start + stage.time_ms
        parts.append(
            element(
                "rect",
                x=percent(axis.share(start)),
                y="10%",
                width=percent(axis.share(end) - axis.share(start)),
                height="80%",
                class_=f"stage s{stage.number}",
            )
        )
        start = end
    return plot(label, *parts, height=_HEIGHT, classes="fig row")


def stage_key(number: int) -> Svg:
    """The fill of one part, to stand beside its name."""
    swatch = element("rect", width=12, height=12, class_=f"stage s{number}")
    return element("svg", swatch, width=12, height=12, class_="fig key", aria_hidden="true")
