"""Axes and marks of a picture in SVG, as text; every word in it is escaped.

What is drawn carries the class ``s<series>`` and the attribute ``data-m``, so that a page's script
can show, hide and point at it. Without a script the picture is complete.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

# Okabe and Ito's colours, which people with colour-blindness can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8a7d00")
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 14.0, 12.0, 44.0
_TICKS = 6


@dataclass(frozen=True, slots=True)
class ChartAxis:
    """One direction: numbers from ``low`` to ``high``.

    Attributes:
        log: equal ratios are equally far apart.
        names: of 0, 1, 2, …, where the numbers stand for something else.
    """

    low: float
    high: float
    label: str
    log: bool = False
    names: tuple[str, ...] = ()

    @classmethod
    def around(
        cls, values: Sequence[float], label: str, *, log: bool = False, zero: bool = False
    ) -> "ChartAxis":
        """One on which all the values lie, with a little room."""
        kept = [v for v in values if math.isfinite(v) and (v > 0.0 or not log)]
        low, high = (min(kept), max(kept)) if kept else (1.0, 10.0)
        if log:
            return cls(low / 1.3, high * 1.3, label, log=True)
        room = 0.05 * (high - low) or 0.1 * abs(high) or 1.0
        return cls(0.0 if zero else low - room, high + room, label)

    def share(self, value: float) -> float:
        """Where a value lies, 0 at ``low`` and 1 at ``high``."""
        if self.log:
            value = max(value, self.low)
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def said(self, value: float) -> str:
        """What stands at a tick."""
        return self.names[round(value)] if self.names else f"{value:g}"

    def ticks(self) -> Iterator[float]:
        """Round numbers inside, few enough to be read; with names, one for each."""
        if self.names:
            yield from map(float, range(len(self.names)))
            return
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)))
            every = (digit * 10.0**decade for decade in decades for digit in (1, 2, 5))
            yield from (value for value in every if self.low <= value <= self.high)
            return
        raw = (self.high - self.low) / _TICKS
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(power * n for n in (1, 2, 5, 10) if power * n >= raw)
        for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1):
            yield number * step


@dataclass(frozen=True, slots=True)
class Canvas:
    """A picture with two axes."""

    x: ChartAxis
    y: ChartAxis
    width: float = 820.0
    height: float = 380.0

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where a point lies on the picture, in its units."""
        across, up = self.width - _LEFT - _RIGHT, self.height - _TOP - _BOTTOM
        return _LEFT + across * self.x.share(x), _TOP + up * (1.0 - self.y.share(y))

    def drawn(self, marks: Sequence[str], title: str) -> str:
        """The whole picture with grid, axes and the marks on top."""
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" role="img" '
            f'aria-label="{escape(title)}">{"".join(self._grid())}{"".join(marks)}</svg>'
        )

    def _grid(self) -> Iterator[str]:
        bottom, right = self.height - _BOTTOM, self.width - _RIGHT
        for value in self.x.ticks():
            x, _ = self.at(value, self.y.low)
            yield line((x, _TOP), (x, bottom), "grid")
            yield text(x, bottom + 16, self.x.said(value), "tick", anchor="middle")
        for value in self.y.ticks():
            _, y = self.at(self.x.low, value)
            yield line((_LEFT, y), (right, y), "grid")
            yield text(_LEFT - 6, y + 4, self.y.said(value), "tick", anchor="end")
        yield text((_LEFT + right) / 2, self.height - 6, self.x.label, "label", anchor="middle")
        middle = (_TOP + bottom) / 2
        turned = f' transform="rotate(-90 14 {middle:.1f})"'
        yield text(14, middle, self.y.label, "label", anchor="middle", extra=turned)


def line(
    start: tuple[float, float], end: tuple[float, float], kind: str, *, colour: str = ""
) -> str:
    """A straight line."""
    stroke = f' stroke="{colour}"' if colour else ""
    return (
        f'<line class="{kind}" x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" '
        f'y2="{end[1]:.1f}"{stroke}/>'
    )


def path(points: Sequence[tuple[float, float]], kind: str, colour: str) -> str:
    """Points joined in order."""
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{kind}" points="{joined}" stroke="{colour}" fill="none"/>'


def dot(centre: tuple[float, float], kind: str, colour: str, *, title: str, mark: str = "") -> str:
    """A point; ``mark`` names what it stands for, ``title`` is shown when one points at it."""
    named = f' data-m="{escape(mark)}" tabindex="0"' if mark else ""
    return (
        f'<circle class="{kind}" cx="{centre[0]:.1f}" cy="{centre[1]:.1f}" r="4.5" '
        f'fill="{colour}"{named}><title>{escape(title)}</title></circle>'
    )


def box(
    corner: tuple[float, float], size: tuple[float, float], kind: str, colour: str, *, title: str
) -> str:
    """A filled rectangle from its upper left corner."""
    return (
        f'<rect class="{kind}" x="{corner[0]:.1f}" y="{corner[1]:.1f}" width="{size[0]:.1f}" '
        f'height="{size[1]:.1f}" fill="{colour}"><title>{escape(title)}</title></rect>'
    )


def text(
    x: float, y: float, words: str, kind: str, *, anchor: str = "start", extra: str = ""
) -> str:
    """Words at a place; ``extra`` is markup of our own."""
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>'
        f"{escape(words)}</text>"
    )
