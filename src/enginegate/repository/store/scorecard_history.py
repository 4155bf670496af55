"""What a workspace and a live repository know of one scorecard since it was made."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from enginegate.decision import Decision
from enginegate.errors import EnginegateError
from enginegate.evidence import Scorecard
from enginegate.repository.history.audit import AuditLog, Event
from enginegate.repository.store.layout import Layout
from enginegate.watch.log import WatchCheck, WatchLog
from enginegate.workspace import Workspace


@dataclass(frozen=True, slots=True)
class ScorecardHistory:
    """Facts for a page about one scorecard.

    Attributes:
        events: of the audit log, of every model, oldest first.
        checks: of the releases that were published of it, oldest first.
        approvals: that the audit log has as well, oldest first.
    """

    events: tuple[Event, ...] = ()
    checks: tuple[WatchCheck, ...] = ()
    approvals: tuple[Decision, ...] = ()

    @classmethod
    def read(cls, scorecard: Scorecard, root: Path, workspace: Workspace) -> "ScorecardHistory":
        """As far as it can be read: a release whose manifest is damaged has no checks here.

        Args:
            scorecard: that it is about.
            root: the live repository, which need not be there yet.
            workspace: keeps decisions and checks.

        Raises:
            TamperedError: the audit log was changed.
            InputError: a decision cannot be read.
        """
        events = AuditLog(root).of(scorecard.model)
        own = [event for event in events if event.scorecard == scorecard.digest]
        approved = {event.operation for event in own if event.event == "approved"}
        layout = Layout(root, scorecard.model)
        checks: list[WatchCheck] = []
        for number in sorted({e.release for e in own if e.release and e.event == "published"}):
            with suppress(EnginegateError):
                checks += WatchLog.at(workspace, layout.release(number)).read()
        return cls(
            events=events,
            checks=tuple(checks),
            approvals=tuple(
                decision
                for decision in workspace.decisions(scorecard.digest)
                if decision.digest in approved
            ),
        )
