"""One way to draw: matplotlib to SVG. Only this module knows matplotlib, and imports it late.

An artist that is drawn with ``gid=Drawing.tag(…)`` becomes a group with these classes, the
attribute ``data-m`` and a tooltip, so that a page's script can show, hide and point at it. Equal
input gives equal bytes.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which people with colour-blindness can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8a7d00")
_WIDTH_INCHES = 9.0
_NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}
# The style is the process's, and flows draw in threads.
_STYLE_LOCK = Lock()


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure while it is being drawn."""

    axes: "Axes"
    _tags: dict[str, str] = field(default_factory=dict)

    def tag(self, classes: str, *, title: str = "", mark: str = "") -> str:
        """The ``gid`` of one artist.

        Args:
            classes: of its group, such as ``s0 dot``.
            title: shown when one points at it.
            mark: names what it stands for, in ``data-m``.
        """
        attributes = f'class="{escape(classes)}"'
        if mark:
            attributes += f' data-m="{escape(mark)}" tabindex="0"'
        tooltip = f"<title>{escape(title)}</title>" if title else ""
        gid = f"tag{len(self._tags)}"
        self._tags[gid] = f"<g {attributes}>{tooltip}"
        return gid

    def limit(self, p99_ms: float) -> None:
        """The SLO across the picture, whose upward direction is logarithmic."""
        from matplotlib.ticker import LogLocator  # noqa: PLC0415

        self.axes.axhline(p99_ms, color="#666666", linestyle="--", label=f"SLO {p99_ms:g} ms")
        self.axes.set_yscale("log")
        self.axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        self.axes.yaxis.set_major_formatter("{x:g}")
        self.axes.yaxis.set_minor_formatter("")

    def whole_numbers(self) -> None:
        """Ticks of a count."""
        self.axes.locator_params(axis="x", integer=True)

    def svg(self) -> bytes:
        """The picture, readable on a light and on a dark page."""
        figure = self.axes.get_figure(root=True)
        if figure is None:
            return b""
        if self.axes.get_legend_handles_labels()[0]:
            figure.legend(fontsize="small", loc="outside right upper")
        written = io.BytesIO()
        figure.savefig(written, format="svg", metadata=_NO_METADATA)
        # Matplotlib's own ids repeat from picture to picture; a page holds several.
        named = re.sub(
            r'<g id="([^"]*)"(/?)>',
            lambda found: self._tags.get(found[1], "<g>") if not found[2] else "",
            written.getvalue().decode(),
        )
        label = escape(self.axes.get_title())
        return named.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1).encode()


@contextmanager
def drawing(
    title: str, xlabel: str, ylabel: str, *, height_inches: float = 4.6
) -> Iterator[Drawing]:
    """A picture with two axes and a grid; take its `svg` in the block."""
    from matplotlib import rc_context  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    style = rc_context(
        {
            "axes.axisbelow": True,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlesize": "medium",
            "svg.fonttype": "none",  # words stay words: searchable, and in the reader's font
            "svg.hashsalt": "enginegate",
            "text.parse_math": False,  # a model's name may hold dollars
        }
    )
    with _STYLE_LOCK, style:
        figure = Figure(figsize=(_WIDTH_INCHES, height_inches), layout="constrained")
        axes = figure.subplots()
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
        axes.grid(visible=True, which="both", alpha=0.25)
        axes.tick_params(which="both", length=0)
        yield Drawing(axes)
