"""The page put together: a strip with the state, the evidence, and what happened since.

The evidence lies between two comments. It depends on the scorecard and the installed versions
alone, so those bytes are the same whenever the page is made again; what happens to the scorecard
later changes the strip before them and the timeline after them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from enginegate.evidence import Scorecard
from enginegate.policy.operating import Approval
from enginegate.report.content import obstacles, short_digest
from enginegate.report.decision_page.checks import checks_section
from enginegate.report.decision_page.comparison import comparison_section
from enginegate.report.decision_page.configuration import configuration_section
from enginegate.report.decision_page.forest import forest_section
from enginegate.report.decision_page.history import NO_HISTORY, PageHistory, history_of
from enginegate.report.decision_page.load_curve import load_curve_section
from enginegate.report.decision_page.slices import slices_section
from enginegate.report.decision_page.time_spent import time_spent_section
from enginegate.report.decision_page.verdict_band import footer, verdict_band
from enginegate.report.devices import device_sentences, device_table
from enginegate.report.templates import page_template
from enginegate.repository.store.scorecard_history import ScorecardHistory

_BEGINS, _ENDS = "<!-- evidence begins -->", "<!-- evidence ends -->"


@dataclass(frozen=True, slots=True)
class PageLink:
    """A place with more, which the page names and does not need.

    Attributes:
        words: of the link.
        address: an absolute URL; others are shown as text.
    """

    words: str
    address: str

    @property
    def is_followed(self) -> bool:
        """Whether it may be a link: a script or a path in its place stays text."""
        return self.address.startswith(("https://", "http://"))


def decision_page(
    scorecard: Scorecard, history: PageHistory = NO_HISTORY, links: Sequence[PageLink] = ()
) -> str:
    """The whole page as HTML, which needs no other file and no network.

    Args:
        scorecard: as it is filed: its digest is what a person approves, and is shown.
        history: what happened to it since; see `page_history`.
        links: to MLflow and the like, in the part that may change.
    """
    return page_template("decision_page/templates", "decision.html").render(
        scorecard=scorecard,
        band=verdict_band(scorecard),
        devices=device_table(scorecard),
        device_sentences=device_sentences(scorecard),
        device_obstacles=[
            (view.device, found) for view in scorecard.by_device[1:] if (found := obstacles(view))
        ],
        comparison=comparison_section(scorecard),
        forest=forest_section(scorecard),
        checks=checks_section(scorecard),
        slices=slices_section(scorecard),
        load_curve=load_curve_section(scorecard),
        time_spent=time_spent_section(scorecard),
        configuration=configuration_section(scorecard),
        footer=footer(scorecard),
        history=history.started(scorecard),
        links=links,
        short_digest=short_digest(scorecard),
        begins=_BEGINS,
        ends=_ENDS,
    )


def page_of_log(
    scorecard: Scorecard,
    found: ScorecardHistory,
    links: Mapping[str, str],
    *,
    rules: Approval | None = None,
) -> str:
    """The page as it is filed: with what the audit log and the watch know by now.

    Args:
        scorecard: as it is filed.
        found: what the repository and the workspace know of it.
        links: words -> absolute address.
        rules: say for how long an approval stands; None: not known, so that it is not shown.
    """
    history = history_of(scorecard, found, rules)
    return decision_page(scorecard, history, [PageLink(*link) for link in links.items()])


def evidence_part(page: str) -> str:
    """What of a page depends on its scorecard alone."""
    return page.partition(_BEGINS)[2].partition(_ENDS)[0]
