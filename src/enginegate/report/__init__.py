"""A scorecard for people: in the terminal, as Markdown, and in plain sentences."""

from enginegate.report.approval_form import ApprovalQuestion, approval_form_text
from enginegate.report.content import (
    NO_SIZES,
    CandidateObstacle,
    EngineSizes,
    Row,
    change_heading,
    obstacles,
    row_of,
    sentences,
    short_digest,
)
from enginegate.report.decision_page import (
    PageHistory,
    PageLink,
    TimelineEntry,
    decision_page,
    evidence_part,
    history_of,
    page_history,
    page_of_log,
)
from enginegate.report.explain import (
    candidate_meaning,
    candidates_named,
    explain,
    print_explained,
)
from enginegate.report.html import candidate_figures, serving_figures, serving_page
from enginegate.report.live_timeline import LiveTimeline, live_timeline
from enginegate.report.markdown import (
    approval_markdown,
    scorecard_markdown,
)
from enginegate.report.serving import ServingReport, accuracies, serving_report
from enginegate.report.terminal import (
    print_approval,
    print_measured,
    print_scorecard,
    print_serving,
    print_table,
    scorecard_text,
    serving_text,
)

__all__ = [
    "NO_SIZES",
    "ApprovalQuestion",
    "CandidateObstacle",
    "EngineSizes",
    "LiveTimeline",
    "PageHistory",
    "PageLink",
    "Row",
    "ServingReport",
    "TimelineEntry",
    "accuracies",
    "approval_form_text",
    "approval_markdown",
    "candidate_figures",
    "candidate_meaning",
    "candidates_named",
    "change_heading",
    "decision_page",
    "evidence_part",
    "explain",
    "history_of",
    "live_timeline",
    "obstacles",
    "page_history",
    "page_of_log",
    "print_approval",
    "print_explained",
    "print_measured",
    "print_scorecard",
    "print_serving",
    "print_table",
    "row_of",
    "scorecard_markdown",
    "scorecard_text",
    "sentences",
    "serving_figures",
    "serving_page",
    "serving_report",
    "serving_text",
    "short_digest",
]
