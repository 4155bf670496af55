"""When Triton's counters are believed, on a clock of our own."""

from types import SimpleNamespace

import pytest

from enginegate.triton.client import TritonClient
from enginegate.triton.types import Statistics

SINCE = Statistics(requests=100, inferences=100, batches={1: 100})


class _Counting:
    """Counts ``answers`` at given times; every call takes as long as it is told to."""

    def __init__(self, answers):
        self.answers, self.now_s = answers, 0.0

    def sleep(self, wait_s):
        self.now_s += wait_s

    def statistics(self, model, version=""):  # noqa: ARG002
        count = sum(self.now_s >= at_s for at_s in self.answers)
        return SINCE + Statistics(requests=count, inferences=count, batches={1: count})


@pytest.fixture
def counted(monkeypatch):
    """Makes a server that counts at given times; gives what is counted, and when."""

    def make(server, answers=3):
        clock = SimpleNamespace(monotonic=lambda: server.now_s, sleep=server.sleep)
        monkeypatch.setattr("enginegate.triton.client.time", clock)
        return TritonClient.statistics_since(
            server, "m", SINCE, answers=answers
        ).requests, server.now_s

    return make


def test_answers_that_are_counted_late_are_waited_for(counted):
    """A busy server may count its last answers seconds after it gave them."""
    found, took_s = counted(_Counting([0.0, 0.0, 3.0]))

    assert found == 3
    assert took_s == pytest.approx(3.0, abs=0.1)


def test_reading_is_never_older_than_the_limit(counted):
    """A client that is held up for long reads once more before it gives up."""
    server = _Counting([0.0, 0.0, 0.005])
    server.sleep = lambda _: setattr(server, "now_s", server.now_s + 60.0)

    assert counted(server)[0] == 3


def test_answers_that_never_come_are_not_waited_for_without_end(counted):
    """Where the model was loaded anew meanwhile, some are in no counter any more."""
    found, took_s = counted(_Counting([0.0]))

    assert found == 1
    assert took_s == pytest.approx(5.0, abs=0.1)


def test_server_with_other_clients_never_stands_still(counted):
    """Once there are enough answers the rest is others', and half a second must do."""
    found, took_s = counted(_Counting([number / 200 for number in range(2000)]))

    assert found > 50
    assert took_s == pytest.approx(0.5, abs=0.1)


def test_counters_that_began_again_are_not_waited_for(counted):
    """They can say nothing of what was answered, so they come back as they are."""
    server = _Counting([])
    server.statistics = lambda *_: Statistics(requests=1)

    assert counted(server) == (-99, 0.0)
