"""Runs of a device's part on its pool: which one is waited for, and when another takes over."""

from types import SimpleNamespace
from uuid import UUID

import pytest
from httpx import ConnectError, HTTPStatusError, Request, Response
from prefect.client.schemas.objects import StateType
from prefect.states import Cancelled, Completed, Crashed, Failed, Running, Scheduled

from enginegate.errors import EnginegateError
from flows.pools import PartRuns, SignsOfLife


class Pool:
    """Prefect's server with one deployment; each run goes through the states it is given."""

    def __init__(self, monkeypatch, *runs):
        self.scripts = [list(states) for states in runs]
        self.keys, self.now_s, self.away = [], 0.0, []
        monkeypatch.setattr("flows.pools.run_deployment", self.start)

    def start(self, name, *, parameters, timeout, idempotency_key):
        del name, parameters, timeout
        self.keys.append(idempotency_key)
        return self.run(len(self.keys) - 1)

    def run(self, number):
        state = self.scripts[number][0]
        return SimpleNamespace(
            id=UUID(int=number), name=f"run-{number}", state=state, start_time=None, created=None
        )

    def read_flow_run(self, run):
        if self.away:
            raise self.away.pop()
        found = self.run(run.int)
        if len(self.scripts[run.int]) > 1:
            self.scripts[run.int].pop(0)
        return found

    def set_flow_run_state(self, run, state, *, force):
        assert force
        self.scripts[run.int] = [state]

    def read_events(self, wanted, *, limit):
        """One heartbeat, and no further."""
        del wanted, limit
        return SimpleNamespace(events=[SimpleNamespace(id=UUID(int=99))])

    def sleep(self, seconds):
        self.now_s += seconds

    def finish(self):
        runs = PartRuns(
            self,
            "qualify-device/m-l4",
            {},
            "key",
            3600.0,
            pool="l4",
            clock=lambda: self.now_s,
            sleep=self.sleep,
        )
        runs.finish()


def test_run_that_completes_is_started_once(monkeypatch):
    pool = Pool(monkeypatch, [Running(), Running(), Completed()])

    pool.finish()

    assert pool.keys == ["key-1"]


def test_another_run_takes_over_from_one_that_crashed(monkeypatch):
    """A worker says that the process died."""
    pool = Pool(monkeypatch, [Running(), Crashed()], [Running(), Completed()])

    pool.finish()

    assert pool.keys == ["key-1", "key-2"]


def test_run_whose_heartbeats_ended_is_crashed_and_taken_over(monkeypatch):
    """Its host is gone, and nobody else would say so; a slow one is not disturbed before."""
    pool = Pool(monkeypatch, [Running()], [Completed()])
    pool.scripts[1].insert(0, Running())

    pool.finish()

    assert pool.keys == ["key-1", "key-2"]
    assert pool.scripts[0][0].type is StateType.CRASHED
    assert pool.now_s > 180.0


def test_run_that_is_under_way_is_waited_for(monkeypatch):
    """A qualification that was killed finds its runs again; those that ended are passed over."""
    pool = Pool(monkeypatch, [Failed()], [Crashed()], [Running(), Completed()])

    pool.finish()

    assert pool.keys == ["key-1", "key-2", "key-3"]


@pytest.mark.parametrize("end", [Failed(message="no such file"), Cancelled(message="by ada")])
def test_part_that_failed_is_not_tried_again(monkeypatch, end):
    """It would fail again; the message says why, and whose log says more."""
    pool = Pool(monkeypatch, [Running(), end])

    with pytest.raises(EnginegateError, match=rf"m-l4 did not end well.*{end.message}"):
        pool.finish()


def test_part_that_kills_every_worker_is_given_up(monkeypatch):
    pool = Pool(monkeypatch, *([Running(), Crashed()] for _ in range(4)))

    with pytest.raises(EnginegateError, match=r"3 runs of .* died"):
        pool.finish()


def test_pool_without_a_worker_is_named_after_the_limit(monkeypatch):
    pool = Pool(
        monkeypatch,
        [
            SimpleNamespace(
                type=StateType.SCHEDULED, name="Late", message="", is_final=lambda: False
            )
        ],
    )

    with pytest.raises(EnginegateError, match=r"run-0 is Late\. If it is late, no worker"):
        pool.finish()


def test_pool_that_takes_nothing_is_said_once_after_a_minute(monkeypatch, caplog):
    """Not when wait_hours are over: nobody looks at a run that nobody has taken."""
    pool = Pool(monkeypatch, [*[Scheduled()] * 100, Running(), Completed()])

    with caplog.at_level("WARNING", "enginegate.devices"):
        pool.finish()

    (line,) = caplog.messages
    assert "no worker of the pool 'l4' has taken run-0 for 60 s" in line
    assert "prefect worker start --pool l4" in line


def test_pool_that_is_busy_for_less_than_a_minute_is_not_mentioned(monkeypatch, caplog):
    pool = Pool(monkeypatch, [*[Scheduled()] * 20, Running(), Completed()])

    pool.finish()

    assert not any("no worker" in line for line in caplog.messages)


def refusal(status):
    """What Prefect's client raises for an answer with that status."""
    answer = Response(status, request=Request("GET", "http://127.0.0.1:4200/api"))
    return HTTPStatusError(f"status {status}", request=answer.request, response=answer)


@pytest.mark.parametrize("error", [refusal(500), refusal(503), ConnectError("refused")])
def test_run_is_waited_for_while_the_server_is_away(monkeypatch, caplog, error):
    """Its database restarts. For so long no heartbeat arrives, and no run is taken for dead."""
    pool = Pool(monkeypatch, [Running()] * 3 + [Completed()])
    seen, read = [], pool.read_flow_run

    def away_after_the_first(run):
        seen.append(pool.now_s)
        if len(seen) == 2:
            pool.away = [error] * 150  # 300 s, where 180 s without a heartbeat are a death
        return read(run)

    pool.read_flow_run = away_after_the_first
    with caplog.at_level("INFO", "enginegate.devices"):
        pool.finish()

    assert pool.keys == ["key-1"]
    assert sum("does not answer" in line for line in caplog.messages) == 1
    assert sum("answers again" in line for line in caplog.messages) == 1


def test_server_that_stays_away_is_given_up(monkeypatch):
    pool = Pool(monkeypatch, [Running()])
    pool.away = [refusal(500)] * 1000

    with pytest.raises(HTTPStatusError, match="status 500"):
        pool.finish()

    assert 600.0 < pool.now_s < 610.0


def test_server_that_refuses_is_not_asked_again(monkeypatch):
    """No database that comes back changes that answer."""
    pool = Pool(monkeypatch, [Running()])
    pool.away = [refusal(403)]

    with pytest.raises(HTTPStatusError, match="status 403"):
        pool.finish()

    assert pool.now_s == 0.0


def test_run_without_heartbeats_is_believed_to_live():
    """They can be turned off; its worker reports a crash of its process all the same."""
    clock = SimpleNamespace(now_s=0.0)
    signs = SignsOfLife(lambda: clock.now_s)

    assert not signs.are_over(StateType.RUNNING, None)
    clock.now_s = 1e6
    assert not signs.are_over(StateType.RUNNING, None)


def test_run_that_no_process_took_up_is_over_after_a_quarter_of_an_hour():
    """Its worker died between taking it and starting it."""
    clock = SimpleNamespace(now_s=0.0)
    signs = SignsOfLife(lambda: clock.now_s)

    assert not signs.are_over(StateType.PENDING, None)
    clock.now_s = 901.0
    assert signs.are_over(StateType.PENDING, None)
