"""What a Prefect server has of releases, by its own API."""

import time
from datetime import timedelta

from prefect.client.orchestration import get_client
from prefect.events.filters import EventFilter, EventOccurredFilter, EventResourceFilter

from enginegate.repository import AuditLog
from enginegate.workspace import now

_PATIENCE_S = 30.0


def kept(root, model, count):
    """The events of a log's lines once the server keeps so many, oldest first."""
    wanted = EventFilter(
        occurred=EventOccurredFilter(since=now() - timedelta(days=1), until=now()),
        resource=EventResourceFilter(id=[f"enginegate.live.{model}"]),
    )
    lines = {f"{line.sequence + 1}:{line.digest}" for line in AuditLog(root).read()}
    end_s = time.monotonic() + _PATIENCE_S
    while True:
        with get_client(sync_client=True) as client:
            events = client.read_events(wanted, limit=50).events
        own = [event for event in events if event.payload.get("audit") in lines]
        if len(own) >= count or time.monotonic() > end_s:
            return sorted(own, key=lambda event: event.occurred)
        time.sleep(0.2)
