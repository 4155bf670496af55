"""A fleet whose releases go to object storage: real Tritons, and a promoter in a process."""

import json
import pickle
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from enginegate.errors import NotEverywhereError
from enginegate.repository import Fleet, ObjectRepository
from enginegate.repository.rollout.target import FleetServer
from tests.fakes.hosts import answer, problems, steps, wait_for_canary

pytestmark = pytest.mark.triton
WINDOW_S = 120.0


_PROMOTER = """
import pickle, sys
from enginegate.policy.operating import Watch
from enginegate.repository.rollout.canary import Canary
from enginegate.repository.rollout.fleet import Fleet
from enginegate.repository.rollout.target import FleetServer
from enginegate.repository.promotion import LiveRepository
from enginegate.repository.rollout.object_repository import ObjectRepository
from enginegate.object_storage import ObjectStore
from enginegate.triton.client import TritonClient

with open(sys.argv[1], "rb") as file:
    (root, address), (own_root, own_address), url, package, window_s = pickle.load(file)
lead = LiveRepository(root, TritonClient(address))
own = FleetServer("own", LiveRepository(own_root, TritonClient(own_address)), lead)
analyse = Canary(lead, "digits", Watch()).analyse
fleet = Fleet(lead, (own,), canary_s=window_s, analyse_canary=analyse)
ObjectRepository(ObjectStore(url), "digits", fleet).publish(package, expected=2)
"""


@pytest.fixture
def here(store, repository, second):
    """A host with two servers, on which release 2 replaced 1."""
    own = FleetServer("own", second, repository)
    return ObjectRepository(store, "digits", Fleet(repository, (own,)))


@pytest.fixture
def promoter(here, package, tmp_path):
    """Publishes release 3, and watches its canary by now."""
    here.publish(package(1.0), expected=None)
    here.publish(package(2.0), expected=1)
    own = here.local.servers[0].repository
    servers = [(each.root, each.client.address) for each in (here.local.primary, own)]
    job = tmp_path / "job"
    job.write_bytes(pickle.dumps((*servers, here.store.url, package(3.0), WINDOW_S)))
    command = [sys.executable, "-c", _PROMOTER, str(job)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        wait_for_canary(here)
        assert answer(here) == (3, 3.0)
        yield running
        running.kill()


@pytest.mark.parametrize("way", ["rollback", "withdraw"])
def test_dead_server_stops_no_rollback(here, package, second_serves, way):
    """It is named; every host rolls back, and so does the dead one when it is repaired."""
    here.publish(package(1.0), expected=None)
    here.publish(package(2.0), expected=1)
    (own,) = here.local.servers
    off = replace(own, repository=replace(own.repository, client=None))
    with_dead = replace(here, local=replace(here.local, servers=(off,)))
    words = (
        r"(?s)Release 1 of digits is live again on the primary, but not everywhere:.*own: .*No live"
    )

    if way == "rollback":
        with pytest.raises(NotEverywhereError, match=words):
            with_dead.rollback("digits", reason="the pager rang")
    else:
        assert re.match(words, with_dead.roll_back_promotion("digits", 2))

    assert (here.current().version, answer(here), second_serves()) == (1, (1, 1.0), (2, 2.0))
    assert steps(here) == ["intent", "loaded", "done"]
    here.repair()
    assert second_serves() == (1, 1.0)
    assert problems(here) == []


@pytest.fixture
def second_serves(here):
    """What the server that is told last answers."""
    return lambda: answer(replace(here, local=here.local.servers[0].repository))


def pointed_at(here):
    """What is live in storage; when it was last written changes with every undone promotion."""
    return json.loads(here.store.read("digits/current.json").content) | {"changed_at": ""}


def test_rollback_cancels_the_canary_analysis(here, promoter, package, second_serves):
    """At once and on every server; what is live in storage was never another release."""
    before, began = pointed_at(here), time.monotonic()

    release = here.rollback("digits", reason="the pager rang")

    assert time.monotonic() - began < WINDOW_S / 2
    said = promoter.communicate(timeout=WINDOW_S)[1]
    assert release.version == 2
    assert "asked for a rollback during the canary analysis" in said
    assert "Release 2 is live again on: the primary" in said
    assert answer(here) == second_serves() == (2, 2.0)
    assert pointed_at(here) == before
    # Where the promoter had not closed its lease yet, a flag in it repeats the step "loaded".
    assert list(dict.fromkeys(steps(here))) == ["intent", "placed", "loaded", "undone"]
    assert (here.releases.versions(), problems(here)) == ((1, 2), [])
    assert here.publish(package(4.0), expected=2).version == 4
    assert answer(here) == second_serves() == (4, 4.0)


@pytest.mark.parametrize("way", ["recover", "rollback"])
def test_killed_promoter_leaves_the_live_release(here, promoter, second_serves, way):
    """Whoever comes next takes the canary back; a rollback is content with that."""
    promoter.send_signal(signal.SIGKILL)
    promoter.wait()
    before = here.store.read("digits/current.json").content

    if way == "recover":
        said = " ".join(here.recover())
        assert "was cut short on the canary. Release 2 is live again on: " in said
        assert "release 3" in said
    else:
        assert here.rollback("digits").version == 2

    assert answer(here) == second_serves() == (2, 2.0)
    assert b'"version": 2' in before
    assert here.current().version == 2
    assert steps(here) == ["intent", "placed", "loaded", "undone"]
    assert (here.releases.versions(), problems(here)) == ((1, 2), [])
