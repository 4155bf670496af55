"""The audit log on the terminal."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from enginegate.errors import TamperedError
from enginegate.messages import counted
from enginegate.policy import Policy
from enginegate.repository import AuditLog, Layout
from enginegate.repository.store.live_record import check_audit


def print_audit(policy: Policy, out: Console, *, as_json: bool) -> bool:
    """Print every event about the policy's model, oldest first, if the chain holds; whether so.

    Raises:
        RepositoryError: the policy's repository is no folder.
    """
    layout = Layout(policy.target.repository, policy.name)
    log = AuditLog(layout.root)
    try:
        check_audit(layout, log)
    except TamperedError as error:
        out.print(f"problem  {error}", markup=False)
        return False
    _print_events(log, policy, out, as_json=as_json)
    return True


def _print_events(log: AuditLog, policy: Policy, out: Console, *, as_json: bool) -> None:
    events = [event for event in log.read() if event.model == policy.name]
    if as_json:
        for event in events:
            out.print(event.canonical_json().decode(), markup=False, soft_wrap=True)
        return
    if not events:
        out.print(f"Nothing has happened to {policy.name} in {policy.target.repository} yet.")
        return
    table = Table("line", "when", "event", "release", "who", "why", "from", "scorecard")
    for event in events:
        table.add_row(
            str(event.sequence + 1),
            event.at.strftime("%Y-%m-%d %H:%M:%S"),
            event.event,
            str(event.release or ""),
            escape(event.who),
            escape(event.why),
            escape(event.origin),
            (event.scorecard or "")[:12],
        )
    out.print(table)
    head = log.head()
    if head is not None:
        out.print(f"The chain holds: {counted(head.count, 'line')}, head {head.sha256}")
