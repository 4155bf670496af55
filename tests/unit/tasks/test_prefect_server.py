"""Asking Prefect's server for runs, however many there are."""

from types import SimpleNamespace
from uuid import uuid4

from prefect.client.schemas.filters import FlowRunFilter

from tasks.prefect_server import flow_runs


class Server:
    """Gives the newest runs first; one of the first page ends once that page was given."""

    def __init__(self, count):
        self.runs = [SimpleNamespace(id=uuid4()) for _ in range(count)]
        self.pages = 0

    def read_flow_runs(self, *, flow_run_filter, limit, **_):
        without = flow_run_filter.id.not_any_ if flow_run_filter.id else []
        page = [run for run in self.runs if run.id not in without][:limit]
        self.pages += 1
        del self.runs[0]
        return page


def test_run_that_ends_between_two_pages_hides_no_other():
    """Every run is given once, also where the list moves up meanwhile."""
    server = Server(450)
    every = [run.id for run in server.runs]

    found = [run.id for run in flow_runs(server, FlowRunFilter())]

    assert found == every
    assert server.pages == 3


def test_no_run_is_one_question():
    """A server without runs that match is asked once."""
    server = Server(1)
    assert len(list(flow_runs(server, FlowRunFilter()))) == 1
    assert server.pages == 1
