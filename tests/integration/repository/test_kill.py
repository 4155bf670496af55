"""Promotions and rollbacks are killed under load; what is left is whole, and clients never notice.

The long form is ``benchmarks/kill_promotions.py``.
"""

from typing import get_args

import pytest

from enginegate.repository import Layout
from enginegate.repository.history.journal import Step
from enginegate.triton.server import ServerOptions, start
from tests.kills.campaign import Campaign
from tests.kills.fork_server import ForkServer
from tests.kills.kill_points import Death
from tests.kills.plan import replaced, short
from tests.kills.tagged import CHAIN, ENGINE, QUICK

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("kills")]
RATE_PER_S = 40.0


@pytest.fixture(scope="module")
def campaign(install, tmp_path_factory):
    """A live repository with two releases of an engine and of an ensemble."""
    tmp_path = tmp_path_factory.mktemp("kills")
    (tmp_path / "repository").mkdir()
    options = ServerOptions(flags=QUICK)
    with (
        start(install, tmp_path / "repository", folder=tmp_path, options=options) as server,
        ForkServer(tmp_path / "forks") as forks,
    ):
        made = Campaign(server, forks, tmp_path)
        made.begin(ENGINE)
        made.begin(CHAIN)
        yield made


def test_thirty_kills_under_load(campaign):
    """After each, one release is current, verifies and serves; no client saw a fault or a lie."""
    with campaign.called(ENGINE, CHAIN, rate_per_s=RATE_PER_S) as clients:
        acts = {(what, ENGINE): campaign.acts(what, ENGINE) for what in ("publish", "rollback")}
        plan = short(acts)
        found = [campaign.kill(k.what, k.model, k.death, twice=k.twice) for k in plan]

    assert [kill for kill in found if kill.problems] == []
    assert sum(kill.cut for kill in found) >= 30
    dead_at = {k.death.step for k, kill in zip(plan, found, strict=True) if kill.cut}
    assert dead_at >= set(get_args(Step))
    assert {kill.after == kill.target for kill in found} == {True, False}
    for client in clients:
        report = client.report()
        assert (report.failed, report.errors, client.wrong) == (0, {}, [])
        assert report.sent > 100


def test_kills_of_a_release_that_replaces_the_live_one(campaign):
    """Whatever had been unloaded, one release is current, verifies and serves after each kill."""
    found = [campaign.kill(k.what, k.model, k.death, twice=k.twice) for k in replaced()]

    assert [kill for kill in found if kill.problems] == []
    assert all(kill.cut for kill in found)
    assert {kill.after == kill.target for kill in found} == {True, False}


def test_kill_judge_sees_wrong_answers_and_torn_versions(campaign):
    """The same eyes on a release whose bytes were changed after it was published."""
    layout = Layout(campaign.root, ENGINE)
    current = layout.current()
    with campaign.called(ENGINE, rate_per_s=RATE_PER_S) as (client,):
        campaign.tags[ENGINE, current.version] += 1
        engine = layout.version_folder(current.version) / "engine.bin"
        engine.chmod(0o644)
        engine.write_text("7")
        (campaign.root.parent / f".{ENGINE}-9.left").mkdir()
        killed = campaign.kill("rollback", ENGINE, Death("step", step="intent"))

    said = "\n".join(killed.problems)
    assert "engine.bin is not the file that was recorded" in said
    assert f".{ENGINE}-9.left was left" in said
    assert f"an answer of version {current.version} carries" in said
    assert len(client.wrong) > 0
