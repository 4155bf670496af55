"""A release that goes to several real Tritons: one first, then the rest, or back on all."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from enginegate.decision import Promise
from enginegate.errors import PublishError, RepositoryBusyError, RepositoryError
from enginegate.evidence import Outcome
from enginegate.policy.operating import Watch
from enginegate.repository import Layout, LiveRepository
from enginegate.repository.rollout.canary import Canary, CanaryAnalysis
from enginegate.repository.rollout.fleet import Fleet
from enginegate.repository.rollout.rollout_state import RolloutState
from enginegate.repository.rollout.target import FleetServer
from enginegate.repository.verify import verify
from enginegate.triton.client import TritonClient
from enginegate.triton.endpoint import LiveAddresses
from enginegate.triton.server import start
from enginegate.watch.log import WatchLog
from enginegate.workspace import Workspace
from validation.live import judge_reading

pytestmark = pytest.mark.triton

# Fails where a file named "broken" lies in the server's repository.
BREAKABLE = """
        if (folder.parent.parent / "broken").exists():
            raise RuntimeError("this host cannot run it")
"""


@pytest.fixture
def twin(install, server, repository, tmp_path):
    """Another server of the primary's repository."""
    folder = tmp_path / "twin"
    with start(install, server.repository, folder=folder) as running, running.client() as client:
        yield FleetServer("twin", replace(repository, client=client), repository)


@pytest.fixture
def own(repository, second):
    """A server with a repository of its own."""
    return FleetServer("own", second, repository)


@pytest.fixture
def gone(repository):
    """A server that is not there."""
    with TritonClient("127.0.0.1:9", timeout_s=1.0) as client:
        yield FleetServer("gone", replace(repository, client=client), repository)


def answers(*repositories: LiveRepository) -> set[tuple[int, float]]:
    """Which versions answer, and what they add."""
    x = np.zeros((1, 2), np.float32)
    replies = [each.client.infer("digits", {"x": x}) for each in repositories]
    return {(int(reply.model_version), float(reply.outputs["y"][0, 0])) for reply in replies}


def problems(fleet):
    return [check.problem for check in verify(fleet) if check.problem]


def test_rollout_reaches_every_server_or_none(repository, twin, own, package, tmp_path):
    """The canary is watched before the rest is told; one that fails returns all that were."""
    everywhere = (repository, twin.repository, own.repository)
    told = []

    def hold(seconds, _check):
        others = [twin.repository.client, own.repository.client]
        told.append((seconds, answers(repository), [c.model_ready("digits") for c in others]))

    fleet = Fleet(repository, (twin, own), canary_s=7.0, analyse_canary=hold)
    fleet.publish(package(1.0), expected=None)
    assert told == [(7.0, {(1, 1.0)}, [False, False])]
    assert answers(*everywhere) == {(1, 1.0)}
    assert problems(fleet) == []

    wrong = package(2.0)
    model = tmp_path / "built" / "2.0" / "model.py"
    lines = model.read_text().partition("        self.offset")
    model.write_text(lines[0] + BREAKABLE + lines[1] + lines[2])
    (own.repository.root / "broken").touch()
    with pytest.raises(
        PublishError,
        match=r"(?s)release 2 failed at server 'own'.*this host cannot run it.*"
        "Release 1 is live again on: own, twin, the primary",
    ):
        fleet.publish(wrong, expected=1)

    assert answers(*everywhere) == {(1, 1.0)}
    assert fleet.serves("digits")
    assert problems(fleet) == []


def test_canary_that_does_not_pass_goes_back(repository, own, package):
    """No other server is ever told."""

    def fail(_seconds, _check):
        raise RepositoryError("7 of 100 requests failed on it")

    fleet = Fleet(repository, (own,), canary_s=1.0, analyse_canary=fail)

    with pytest.raises(PublishError, match=r"(?s)at the canary.*7 of 100.*Nothing is live again"):
        fleet.publish(package(1.0), expected=None)

    assert not repository.client.model_ready("digits")
    assert not own.repository.root.joinpath("digits").exists()


SLOW = """
        time.sleep(0.4)
        return ["""


# Far above what a busy machine takes.
PROMISE = Promise(p99_ms=9.0, throughput_per_s=400.0, slo_p99_ms=250.0)


def slower(made, folder):
    """The same package, slower than its SLO allows."""
    model = folder / "built" / "2.0" / "model.py"
    text = model.read_text().replace("import numpy", "import time\nimport numpy")
    model.write_text(text.replace("\n        return [", SLOW, 1))
    return made


@pytest.fixture
def watched(repository, own, server, tmp_path):
    """A fleet whose canary has to pass the checks of the watch, and where they are kept."""
    workspace = Workspace(tmp_path / "workspace")
    looking = CanaryAnalysis(
        judge_reading, LiveAddresses(grpc=server.grpc, metrics=server.metrics), workspace
    )
    rules = Watch(look_s=1.0, min_requests=5)
    canary = Canary(repository, "digits", rules, analysis=looking)
    return Fleet(repository, (own,), canary_s=2.0, analyse_canary=canary.analyse), canary


@pytest.mark.long
def test_slow_canary_goes_back_although_no_request_failed(
    watched, repository, own, package, tmp_path
):
    """The watch's own look says so, with numbers; one that is as promised goes everywhere."""
    fleet, canary = watched
    fleet.publish(package(1.0, promise=PROMISE), expected=None)
    first = WatchLog.at(canary.analysis.workspace, Layout(fleet.root, "digits").release(1)).read()
    assert [(look.number, look.version) for look in first] == [(1, 1), (2, 1)]
    assert not [f for look in first for f in look.findings if f.outcome > Outcome.INCONCLUSIVE]
    assert first[0].reading.pending is not None

    with pytest.raises(
        PublishError,
        match=r"(?s)release 2 failed at the canary \(the primary\): check 1 of release 2 of "
        r"digits: failed \(latency: (\d+) of \1 requests of ours took more than 250 ms.*"
        "Release 1 is live again on: the primary",
    ):
        fleet.publish(slower(package(2.0, promise=PROMISE), tmp_path), expected=1)

    release = Layout(fleet.root, "digits").release(2)
    (look,) = WatchLog.at(canary.analysis.workspace, release).read()
    assert (look.reading.failed, look.action) == (0, "rollback")
    assert answers(repository, own.repository) == {(1, 1.0)}
    assert problems(fleet) == []


def test_rollback_cancels_a_long_check_of_the_canary(watched, repository, own, package):
    """At once, though the check would last a minute; nothing is kept of it."""
    fleet, canary = watched
    fleet.publish(package(1.0, promise=PROMISE), expected=None)
    looked = threading.Event()

    patient = replace(canary, rules=Watch(look_s=60.0))

    def analyse(seconds, check):
        patient.analyse(seconds, lambda: (looked.set(), check()))

    fleet = replace(fleet, canary_s=60.0, analyse_canary=analyse)
    with ThreadPoolExecutor(1) as promoter:
        promotion = promoter.submit(fleet.publish, package(2.0, promise=PROMISE), expected=1)
        while not looked.wait(0.05):
            assert not promotion.done()
        started = time.monotonic()
        assert fleet.rollback("digits", expected=2).version == 1
        with pytest.raises(PublishError, match="asked for a rollback during the canary analysis"):
            promotion.result()

    assert time.monotonic() - started < 30.0
    assert answers(repository, own.repository) == {(1, 1.0)}
    release = Layout(fleet.root, "digits").release(2)
    assert WatchLog.at(canary.analysis.workspace, release).read() == ()


def test_dead_server_stops_a_roll_out_but_no_rollback(repository, twin, gone, package):
    """Publishing is refused before anything is done; going back reaches whoever answers."""
    repository.publish(package(1.0), expected=None)
    repository.publish(package(2.0), expected=1)
    twin.replicate(repository.bring_up("digits"))
    dead_lead = replace(repository, client=gone.repository.client)

    with pytest.raises(RepositoryError, match="gone does not answer, so nothing was begun"):
        Fleet(repository, (twin, gone)).publish(package(3.0), expected=2)
    with pytest.raises(RepositoryError, match=r"(?s)Release 1 .* on twin.*the primary: .*gone: "):
        Fleet(dead_lead, (twin, gone)).rollback("digits")

    assert answers(twin.repository) == {(1, 1.0)}
    assert answers(repository) == {(2, 2.0)}
    fleet = Fleet(repository, (twin,))
    assert any("Release 1 of digits was loaded" in sentence for sentence in fleet.repair())
    assert answers(repository, twin.repository) == {(1, 1.0)}
    assert problems(fleet) == []


_KILLED = """
import os, pickle, signal, sys
from enginegate.repository.rollout.fleet import Fleet
from enginegate.repository.rollout.target import FleetServer
from enginegate.repository.promotion import LiveRepository
from enginegate.triton.client import TritonClient

with open(sys.argv[1], "rb") as file:
    (root, address), (own_root, own_address), package = pickle.load(file)

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

hold = die if sys.argv[2] == "on-the-canary" else None
FleetServer.replicate = die
lead = LiveRepository(root, TritonClient(address))
own = LiveRepository(own_root, TritonClient(own_address))
Fleet(lead, (FleetServer("own", own, lead),), 1.0, hold).publish(package, expected=None)
"""


@pytest.mark.parametrize("moment", ["on-the-canary", "after-it-held"])
def test_killed_roll_out_ends_the_same_everywhere(repository, own, package, tmp_path, moment):
    """A canary that had not passed is rolled back; after it had, the others replicate."""
    job = tmp_path / "job"
    hosts = [(each.root, each.client.address) for each in (repository, own.repository)]
    job.write_bytes(pickle.dumps((*hosts, package(1.0))))
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED, str(job), moment], check=False, capture_output=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()

    fleet = Fleet(repository, (own,))
    said = fleet.recover()

    assert len(said) == 1
    assert problems(fleet) == []
    if moment == "on-the-canary":
        assert "was cut short on the canary" in said[0]
        assert not repository.client.model_ready("digits")
    else:
        assert said == ("own was brought to release 1 of digits.",)
        assert answers(repository, own.repository) == {(1, 1.0)}


def test_concurrent_rollout_is_refused(repository, own, package, monkeypatch):
    """A canary may be watched for long; the second is refused with the holder named."""
    monkeypatch.setattr("enginegate.repository.rollout.rollout_state._LOCK_TIMEOUT_S", 0.1)
    fleet = Fleet(repository, (own,))

    with (
        RolloutState(fleet.root).exclusive(),
        pytest.raises(RepositoryBusyError, match=f"pid {os.getpid()}"),
    ):
        fleet.publish(package(1.0), expected=None)


def test_server_with_another_release_is_named(repository, own, package):
    """Its repository must be where the evidence was made before anything begins."""
    repository.publish(package(1.0), expected=None)
    fleet = Fleet(repository, (own,))

    with pytest.raises(RepositoryError, match=r"Server 'own' has release none .*while 1 was"):
        fleet.publish(package(2.0), expected=1)
    with pytest.raises(RepositoryError, match=r"Release 1 of digits is live in .* while none"):
        fleet.publish(package(2.0), expected=None)

    assert fleet.recover() == ()
    assert answers(repository) == {(1, 1.0)}
