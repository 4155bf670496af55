"""Which servers a policy's release goes to, and what the first one is watched for."""

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import pytest

from enginegate.errors import RepositoryError
from enginegate.operating import Watch
from enginegate.policy import parse_policy
from enginegate.repository import (
    Current,
    Fleet,
    Layout,
    LiveRepository,
    ObjectRepository,
    open_repository,
)
from enginegate.repository.rollout import Progress, Rollouts
from enginegate.repository.targets import Canary
from enginegate.triton.answers import Statistics
from enginegate.workspace import Workspace
from tests.fakes.lab import POLICY

RULES = Watch(max_error_share=0.01, min_requests=100)


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
def test_a_canary_is_judged_by_its_own_counters(counts, serving, message):
    """Only what failed since it was told counts, and too few requests decide nothing."""
    canary = Canary(FakeLead(counts, serving), "digits", RULES, sleep=lambda _s: None)

    if not message:
        canary.hold(0.01)
        return
    with pytest.raises(RepositoryError, match=message):
        canary.hold(0.01)


def test_a_canary_that_somebody_ends_is_watched_no_longer(tmp_path):
    """At its next look, though nothing failed."""
    rollouts = Rollouts(tmp_path)
    now = datetime.now(tz=UTC)
    current = Current(version=2, known=(2,), changed_at=now)
    Layout(tmp_path, "digits").current_file.write_bytes(current.pretty_json())
    rollouts.note(Progress(model="digits", before=1, canary=2))
    goes_on = partial(rollouts.check_goes_on, "digits")
    ask = partial(rollouts.ask_to_end, "digits", leave=None)
    lead = FakeLead([(0, 0)])
    canary = Canary(lead, "digits", RULES, sleep=lambda _s: ask(), goes_on=goes_on)

    with pytest.raises(RepositoryError, match="a rollback was asked for"):
        canary.hold(60.0)


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
def test_the_policy_says_where_a_release_goes(tmp_path, target, kind, local):
    """A fleet around the lead, storage around either; what does not answer has no client."""
    rules = parse_policy(
        {**POLICY, "target": {"repository": str(tmp_path / "live"), **target}}, "test"
    )

    opened = open_repository(rules, Workspace(tmp_path / "workspace"))

    assert isinstance(opened, kind)
    assert local is None or isinstance(opened.local, local)
    assert opened.root == tmp_path / "live"
    fleet = getattr(opened, "local", opened)
    if isinstance(fleet, Fleet):
        (member,) = fleet.members
        assert (member.name, member.repository.client) == ("b", None)
        assert member.shares is ("objects" not in target)
