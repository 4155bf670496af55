"""One self-contained page on which a person decides: the evidence of a scorecard, in eight parts.

Each part is a module that makes its content from records, and a template that lays it out. What
draws and decides nothing is kept apart from what is shown: nothing here reads a file or a clock.
"""

from enginegate.report.decision_page.history import (
    PageHistory,
    TimelineEntry,
    history_of,
    page_history,
)
from enginegate.report.decision_page.page import (
    PageLink,
    decision_page,
    evidence_part,
    page_of_log,
)

__all__ = [
    "PageHistory",
    "PageLink",
    "TimelineEntry",
    "decision_page",
    "evidence_part",
    "history_of",
    "page_history",
    "page_of_log",
]
