"""SVG that is part of a page: no file of its own, no library, equal bytes for equal input.

Marks are placed in per cent of the plot and sized in pixels, so that a plot fills any width while
its words and marks stay as large as the page's. Colours are the page's: an element has a class,
and no colour.
"""

import math
from collections.abc import Iterable
from html import escape
from typing import Literal, NamedTuple

# Between a tick and the next: a round number that people count in.
_ROUND_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_ROUNDING = 1e-9

MarkShape = Literal["dot", "ring", "cross", "square", "diamond", "up", "left", "right"]
Anchor = Literal["start", "middle", "end"]
_PATHS: dict[MarkShape, str] = {
    "dot": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "ring": "M-9 0a9 9 0 1 0 18 0a9 9 0 1 0-18 0z",
    "cross": "M-4-4L4 4M-4 4L4-4",
    "square": "M-3.5-3.5h7v7h-7z",
    "diamond": "M0-4.5L4.5 0L0 4.5L-4.5 0z",
    "up": "M-5 9L0 1L5 9z",
    "left": "M9-5L1 0L9 5z",
    "right": "M-9-5L-1 0L-9 5z",
}


class Svg(str):
    """Finished markup, which a template does not escape again."""

    __slots__ = ()

    def __html__(self) -> str:
        """What Jinja takes as it is."""
        return str(self)


class PlotAxis(NamedTuple):
    """A linear scale from one end of the plot to the other."""

    low: float
    high: float

    def share(self, value: float) -> float:
        """How far along the axis a value lies, 0 to 1; what is beyond an end lies at that end."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def holds(self, value: float) -> bool:
        """Whether a value lies on the axis."""
        return self.low <= value <= self.high

    def ticks(self, most: int = 5) -> tuple[float, ...]:
        """Round numbers along the axis, in not more than ``most`` steps."""
        least = (self.high - self.low) / most
        magnitude = 10.0 ** math.floor(math.log10(least))
        steps = (step * magnitude for step in _ROUND_STEPS)
        step = next(step for step in steps if step >= least * (1.0 - _ROUNDING))
        first = math.ceil(self.low / step - _ROUNDING)
        last = math.floor(self.high / step + _ROUNDING)
        return tuple(round(number * step, 12) + 0.0 for number in range(first, last + 1))


def axis_of(values: Iterable[float], *, headroom: float = 0.0) -> PlotAxis:
    """The axis that holds all values, and so much of its length more at either end.

    Values that are all equal, or none at all, get an axis of the length 1.
    """
    found = tuple(values)
    low, high = min(found, default=0.0), max(found, default=1.0)
    if not high > low:
        high = low + 1.0
    more = headroom * (high - low)
    return PlotAxis(low - more, high + more)


def element(tag: str, *content: str, **attributes: str | float | None) -> Svg:
    """One element.

    Args:
        tag: its name.
        content: what it holds; text is escaped, `Svg` is not.
        attributes: ``class_`` stands for ``class`` and ``_`` for ``-``; None is left out.
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    held = "".join(part if isinstance(part, Svg) else escape(part, quote=False) for part in content)
    return Svg(f"<{tag}{given}>{held}</{tag}>" if held else f"<{tag}{given}/>")


def percent(share: float) -> str:
    """A place in the plot; two decimals are finer than a screen shows."""
    return f"{_number(100 * share)}%"


def plot(label: str, *content: Svg, height: int, classes: str) -> Svg:
    """A picture as wide as there is room.

    Args:
        label: its text alternative.
        content: its elements, the lowest first.
        height: in pixels.
        classes: of the page's style.
    """
    return element(
        "svg",
        *content,
        class_=classes,
        width="100%",
        height=height,
        role="img",
        aria_label=label,
    )


def mark(shape: MarkShape, place: tuple[float, float], classes: str, *, title: str = "") -> Svg:
    """A mark of a fixed size at a place in shares of width and height; see `definitions`.

    Its shape says what it is; ``title`` is shown when one points at it.
    """
    return element(
        "use",
        *([element("title", title)] if title else []),
        href=f"#{shape}",
        x=percent(place[0]),
        y=percent(place[1]),
        class_=classes,
    )


def definitions() -> Svg:
    """The shapes of marks, and hatched and dotted fills, which a page holds once."""
    stripe = element("path", d="M-1 7L7-1M-1 1L1-1M5 7L7 5", class_="stripe")
    ground = element("rect", width=4, height=4, class_="dotted")
    dots = element("circle", cx=1, cy=1, r=0.7, class_="dot")
    fills = (_pattern("hatch", 6, stripe), _pattern("dots", 4, ground, dots))
    shapes = (element("path", id=name, d=path) for name, path in _PATHS.items())
    held = element("defs", *fills, *shapes)
    return element("svg", held, width=0, height=0, class_="defs", aria_hidden="true")


def _pattern(name: str, size: int, *content: Svg) -> Svg:
    units = "userSpaceOnUse"
    return element("pattern", *content, id=name, width=size, height=size, patternUnits=units)


def line(start: tuple[float, float], end: tuple[float, float], classes: str) -> Svg:
    """A straight line between two places in shares of width and height."""
    (x1, y1), (x2, y2) = start, end
    return element(
        "line", x1=percent(x1), y1=percent(y1), x2=percent(x2), y2=percent(y2), class_=classes
    )


def words(
    text: str,
    place: tuple[float, float],
    anchor: Anchor = "middle",
    *,
    by: tuple[float, float] = (0.0, 0.0),
    classes: str | None = None,
) -> Svg:
    """Text at a place in shares of width and height, moved ``by`` pixels to the right and down."""
    return element(
        "text",
        text,
        x=percent(place[0]),
        y=percent(place[1]),
        dx=by[0] or None,
        dy=by[1] or None,
        text_anchor=None if anchor == "start" else anchor,
        class_=classes,
    )


def _value(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else _number(value)


def _number(value: float) -> str:
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
