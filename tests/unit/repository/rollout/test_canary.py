"""Which servers a policy's release goes to, and what the first one is watched for."""

import itertools
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace

import pytest

from enginegate.errors import RepositoryError, ServerError
from enginegate.policy import parse_policy
from enginegate.policy.operating import Watch
from enginegate.repository import (
    Current,
    Fleet,
    Layout,
    LiveRepository,
    ObjectRepository,
    open_target,
)
from enginegate.repository.rollout.canary import Canary, CanaryAnalysis
from enginegate.repository.rollout.rollout_state import RolloutProgress, RolloutState
from enginegate.triton.endpoint import LiveAddresses
from enginegate.triton.types import Statistics
from enginegate.watch.log import WatchLog
from enginegate.watch.probe import LiveReading, ProbeResult
from enginegate.workspace import Workspace
from tests.fakes.lab import POLICY
from validation.live import judge_reading

RULES = Watch(max_error_share=0.01, min_requests=100)


def goes_on():
    """Nobody asks to cancel."""


@dataclass
class FakeLead:
    """A server whose requests fail on demand; a real one's cannot be made to in a second."""

    counts: list[tuple[int, int]]
    serving: bool = True

    @property
    def client(self):
        return self

    def statistics(self, _model):
        requests, failures = self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]
        return Statistics(requests=requests, failures=failures)

    def serves(self, _model):
        return self.serving


@pytest.mark.parametrize(
    ("counts", "serving", "message"),
    [
        pytest.param([(0, 0), (990, 10)], True, "", id="at-the-limit"),
        pytest.param([(0, 0), (989, 11)], True, "11 of 1000 requests failed", id="above"),
        pytest.param([(0, 0), (2, 1)], True, "", id="too-few-to-tell"),
        pytest.param([(0, 0), (49, 50)], True, "50 of 99 requests failed", id="few-but-too-many"),
        pytest.param([(0, 500), (1000, 500)], True, "", id="failures-of-before"),
        pytest.param([(0, 0)], False, "does not serve the new release", id="gone"),
    ],
)
def test_canary_is_judged_by_its_own_counters(counts, serving, message, monkeypatch):
    """Only what failed since it was told counts, and too few requests decide nothing."""
    clock = SimpleNamespace(monotonic=itertools.count().__next__)
    monkeypatch.setattr("enginegate.repository.rollout.canary.time", clock)
    canary = Canary(FakeLead(counts, serving), "digits", RULES, sleep=lambda _s: None)

    if not message:
        canary.analyse(2.0, goes_on)
        return
    with pytest.raises(RepositoryError, match=message):
        canary.analyse(2.0, goes_on)


def test_cancelled_canary_is_analysed_no_longer(tmp_path):
    """At its next check, though nothing failed."""
    rollouts = RolloutState(tmp_path)
    now = datetime.now(tz=UTC)
    current = Current(version=2, known=(2,), changed_at=now)
    Layout(tmp_path, "digits").current_file.write_bytes(current.pretty_json())
    rollouts.note(RolloutProgress(model="digits", before=1, canary=2))
    ask = partial(rollouts.request_cancel, "digits", leave=None)
    lead = FakeLead([(0, 0)])
    canary = Canary(lead, "digits", RULES, sleep=lambda _s: ask())

    with pytest.raises(RepositoryError, match="asked for a rollback"):
        canary.analyse(60.0, partial(rollouts.check_not_cancelled, "digits"))


def seen(*, over=0, live=400):
    """What a check saw: 20 requests of ours, so many too slow, and so many of others."""
    probe = ProbeResult(
        sent=20, failed=0, over=over, median_ms=3.0, slowest_ms=90.0, versions=("1",)
    )
    return LiveReading(
        lasted_s=30.0, answered=20 + live, failed=0, server_ms=3.0, queue_ms=0.1, probe=probe
    )


def dead():
    raise ServerError("h:1 did not answer")


@pytest.fixture
def canary(repository, package, tmp_path):
    """Release 1 on a server, to be checked."""
    repository.publish(package(1.0), expected=None)
    looking = CanaryAnalysis(
        judge_reading, LiveAddresses(grpc="h:1"), Workspace(tmp_path / "workspace")
    )
    return Canary(repository, "digits", Watch(look_s=30.0), analysis=looking)


@pytest.fixture
def sees(monkeypatch):
    """Let the canary's checks see something; how long each was asked to last."""

    def let(check):
        lengths = []

        def read(_server, _model, _version, *, duration_s, prober):
            lengths.append(duration_s)
            return check(prober) if check.__code__.co_argcount else check()

        monkeypatch.setattr("enginegate.repository.rollout.canary.take_reading", read)
        return lengths

    return let


def looks_of(canary):
    release = Layout(canary.primary.root, "digits").release(1)
    return WatchLog.at(canary.analysis.workspace, release).read()


@pytest.mark.parametrize(
    ("check", "outcomes", "message"),
    [
        pytest.param(seen, ["passed"] * 3, "", id="healthy"),
        pytest.param(
            lambda: seen(over=20),
            ["failed"],
            r"check 1 of release 1 of digits: failed \(latency: 20 of 20 requests of ours took",
            id="slow-though-nothing-failed",
        ),
        pytest.param(
            lambda: seen(over=3), ["passed", "failed"], "6 of 40 requests", id="slow-in-all-checks"
        ),
        pytest.param(dead, ["errored"], r"errored \(measured: h:1 did not", id="not-measured"),
        pytest.param(lambda: seen(live=0), ["inconclusive"] * 3, "", id="too-little-traffic"),
    ],
)
def test_canary_has_to_pass_the_checks_of_the_watch(canary, sees, caplog, check, outcomes, message):
    """By its judge, over all checks together; what could not be measured is not fine, and what too
    few requests leave open is said."""
    sees(check)

    if message:
        with pytest.raises(RepositoryError, match=message):
            canary.analyse(90.0, goes_on)
    else:
        canary.analyse(90.0, goes_on)

    checks = looks_of(canary)
    assert [each.outcome.word for each in checks] == outcomes
    assert (checks[-1].action == "rollback") is bool(message)
    assert caplog.text.count("the canary is undecided") == outcomes.count("inconclusive")


@pytest.mark.parametrize(
    ("seconds", "lengths"),
    [(0.0, []), (5.0, [5.0]), (30.0, [30.0]), (100.0, [100 / 3] * 3)],
)
def test_checks_fill_the_analysis(canary, sees, seconds, lengths):
    """None is shorter than the watch's, unless the window is; without one there is none."""
    asked = sees(seen)

    canary.analyse(seconds, goes_on)

    assert asked == pytest.approx(lengths)


def test_long_check_is_cancelled_too(canary, sees):
    """A rollback does not wait for it, and it counts for nothing."""
    looked = threading.Event()

    def long(prober):
        looked.set()
        prober.wait(time.monotonic() + 60.0)
        return seen(over=20)

    def cancel():
        if looked.is_set():
            raise RepositoryError("a rollback was asked for")

    sees(long)
    started = time.monotonic()
    with pytest.raises(RepositoryError, match="a rollback was asked for"):
        canary.analyse(60.0, cancel)

    assert time.monotonic() - started < 30.0
    assert looks_of(canary) == ()


def test_canary_can_be_cancelled_after_its_last_check(canary, sees):
    """Checks may be shorter than the time between two questions."""
    asked = []

    def cancel():
        asked.append(True)
        if len(asked) == 2:
            raise RepositoryError("a rollback was asked for")

    sees(seen)
    with pytest.raises(RepositoryError, match="a rollback was asked for"):
        canary.analyse(60.0, cancel)

    assert len(looks_of(canary)) == 2


@pytest.mark.parametrize(
    ("target", "kind", "local"),
    [
        ({}, LiveRepository, None),
        ({"fleet": [{"name": "b", "endpoint": "127.0.0.1:9"}]}, Fleet, None),
        ({"objects": "s3://bucket/live"}, ObjectRepository, LiveRepository),
        (
            {
                "objects": "s3://bucket/live",
                "fleet": [{"name": "b", "endpoint": "127.0.0.1:9", "repository": "other"}],
            },
            ObjectRepository,
            Fleet,
        ),
    ],
    ids=["one-server", "fleet", "storage", "both"],
)
def test_policy_says_where_a_release_goes(tmp_path, target, kind, local):
    """A fleet around the primary, storage around either; what does not answer has no client."""
    rules = parse_policy(
        {**POLICY, "target": {"repository": str(tmp_path / "live"), **target}}, "test"
    )

    opened = open_target(rules.live_tables, Workspace(tmp_path / "workspace"))

    assert isinstance(opened, kind)
    assert local is None or isinstance(opened.local, local)
    assert opened.root == tmp_path / "live"
    fleet = getattr(opened, "local", opened)
    if isinstance(fleet, Fleet):
        (server,) = fleet.servers
        assert (server.name, server.repository.client) == ("b", None)
        assert server.shares is ("objects" not in target)
