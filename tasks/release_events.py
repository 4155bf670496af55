"""Changes of what is live, delivered to Prefect's server, also those while it did not answer.

Every change of what is live is a line of the repository's audit log, whoever made it. Prefect gets
an event of each, and a cursor in the workspace says up to which line its server was seen to have
them. An event's id is made from its line: a server that gets it twice keeps one.
"""

import logging
from collections.abc import Sequence
from datetime import timedelta
from itertools import takewhile
from pathlib import Path
from uuid import NAMESPACE_URL, UUID, uuid5

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient
from prefect.events import Event
from prefect.events.filters import EventFilter, EventIDFilter, EventOccurredFilter
from prefect.settings import PREFECT_API_URL

from enginegate.errors import EnginegateError
from enginegate.redact import masked
from enginegate.repository import AuditLog
from enginegate.repository.history.audit import (
    LIVE_EVENTS,
    Cursor,
    LiveChange,
    undelivered_changes,
)
from enginegate.workspace import Workspace, now
from tasks.prefect_server import REFUSALS, quick_client

EVENTS = {
    "published": "enginegate.release.published",
    "rolled back": "enginegate.release.rolled-back",
    "withdrawn": "enginegate.release.withdrawn",
}
# Prefect deletes events that are older; the audit log still has what they would say.
_RETENTION = timedelta(days=7)
# Prefect answers at most so many at a time.
_PAGE = 50
_log = logging.getLogger("enginegate.announce")


@task(task_run_name="announce", cache_policy=NO_CACHE)
def announce_releases(repository: Path, workspace: Workspace) -> tuple[str, ...]:
    """Send the Prefect server each change that it does not have; one sentence for each.

    A change that cannot be sent now is sent by the next promotion, rollback or watch. A change
    that another host decided, and this one only replicated, is that host's to send. A server
    that Prefect starts inside this process alone is nobody's, and gets nothing.
    """
    server = PREFECT_API_URL.value()
    if not server or not repository.is_dir():
        return ()
    cursor = Cursor.of(workspace, server, repository)
    try:
        with cursor.exclusive(), quick_client() as client:
            sent = _send(client, AuditLog(repository), cursor)
    except (EnginegateError, *REFUSALS) as error:
        why = masked(str(error))
        _log.warning("Prefect did not get what became live; the next run sends it: %s", why)
        return ()
    return tuple(f"Prefect was updated: {change}." for change in sent)


def _send(client: SyncPrefectClient, log: AuditLog, cursor: Cursor) -> list[LiveChange]:
    """Send what the server lacks. It keeps an event seconds after it took it, so that only the next
    call sees it there and moves the cursor: what a dying server lost is sent again.
    """
    live = log.of("", *LIVE_EVENTS)
    waiting = undelivered_changes(log.read(), cursor.read(), live)
    oldest = now() - _RETENTION
    young = [change for change in waiting if change.event.at >= oldest]
    present = {event for page in _pages(young) for event in _present(client, page)}
    lacking = [change for change in young if _id(change) not in present]
    for page in _pages(lacking):
        events = [_event(change).model_dump(mode="json") for change in page]
        client.request("POST", "/events", json=events)
    arrived = list(takewhile(lambda c: c.event.at < oldest or _id(c) in present, waiting))
    if arrived:
        cursor.move(arrived[-1].head)
    for change in lacking:
        _log.info("%s", change)
    return lacking


def _present(client: SyncPrefectClient, changes: Sequence[LiveChange]) -> set[UUID]:
    """Which of these, at most a page, the server has."""
    times = [change.event.at for change in changes]
    wanted = EventFilter(
        id=EventIDFilter(id=[_id(change) for change in changes]),
        occurred=EventOccurredFilter(since=min(times), until=max(times)),
    )
    return {event.id for event in client.read_events(wanted, limit=_PAGE).events}


def _event(change: LiveChange) -> Event:
    event, head = change.event, change.head
    live = f"{event.model} release {change.after}" if change.after else event.model
    return Event(
        id=_id(change),
        occurred=event.at,
        event=EVENTS[change.kind],
        resource={
            "prefect.resource.id": f"enginegate.live.{event.model}",
            "prefect.resource.name": live,
        },
        payload={
            "model": event.model,
            "from": change.before,
            "to": change.after,
            "who": event.who,
            "why": event.why,
            "origin": event.origin,
            "scorecard": event.scorecard,
            "audit": f"{head.count}:{head.sha256}",
        },
    )


def _id(change: LiveChange) -> UUID:
    return uuid5(NAMESPACE_URL, f"enginegate:{change.event.digest}")


def _pages(changes: Sequence[LiveChange]) -> list[Sequence[LiveChange]]:
    return [changes[start : start + _PAGE] for start in range(0, len(changes), _PAGE)]
