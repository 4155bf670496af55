"""A scorecard for people: in the terminal, as Markdown, and in plain sentences."""

from enginegate.report.content import NO_SIZES, Obstacle, Row, Sizes, obstacles, row_of, sentences
from enginegate.report.explain import explain
from enginegate.report.markdown import approval_markdown, scorecard_markdown
from enginegate.report.terminal import print_approval, print_scorecard, print_table, scorecard_text

__all__ = [
    "NO_SIZES",
    "Obstacle",
    "Row",
    "Sizes",
    "approval_markdown",
    "explain",
    "obstacles",
    "print_approval",
    "print_scorecard",
    "print_table",
    "row_of",
    "scorecard_markdown",
    "scorecard_text",
    "sentences",
]
