"""Any host can cancel the analysis of a canary, also one that sees only the bucket; no Triton."""

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest

from enginegate.decision import Release
from enginegate.errors import EnginegateError, RepositoryBusyError, RepositoryError
from enginegate.object_storage import ObjectStore
from enginegate.repository import Fleet, ObjectRepository
from enginegate.repository.rollout import object_repository
from enginegate.repository.rollout.target import FleetServer
from enginegate.repository.store.object_journal import ObjectJournal, is_cancelled
from tests.fakes.hosts import live, problems, steps, wait_for_canary

ANALYSIS_S = 60.0
CANCELLED = "asked for a rollback during the canary analysis"


@dataclass
class Analysis:
    """A canary's analysis that a test lets pass; ``said`` is the release, or why there is none."""

    passed: threading.Event = field(default_factory=threading.Event)
    checks: bool = True
    said: Release | str = ""

    def run(self, seconds, check):
        deadline = time.monotonic() + seconds
        while not self.passed.wait(0.02):
            assert time.monotonic() < deadline, "nobody ended the analysis"
            if self.checks:
                check()


@pytest.fixture
def here(store, host):
    """It promotes, to two servers."""
    one, two = host("one").local, host("two").local
    fleet = Fleet(one, (FleetServer("two", two, one),), ANALYSIS_S)
    return ObjectRepository(store, "digits", fleet)


@pytest.fixture
def there(host):
    """Another host, with a server of its own; it replicates."""
    return host("there")


@pytest.fixture
def released(here, package):
    """Releases 1 and 2, whose canaries passed."""
    here.publish(package(1.0), expected=None)
    here.publish(package(2.0), expected=1)


@pytest.fixture
def promoting(here, package):
    """Publish on `here` meanwhile: the block runs during the analysis, which ends with it."""

    @contextmanager
    def run(expected):
        analysis = Analysis()
        watching = replace(here, local=replace(here.local, analyse_canary=analysis.run))

        def publish():
            try:
                analysis.said = watching.publish(package(9.0), expected=expected)
            except EnginegateError as error:
                analysis.said = str(error)

        promotion = threading.Thread(target=publish)
        promotion.start()
        try:
            wait_for_canary(here)
            yield analysis
        finally:
            analysis.passed.set()
            promotion.join()

    return run


def requests_in(host):
    """How often the journal in storage says that a canary analysis was cancelled."""
    return len([entry for entry in host.journal.read() if is_cancelled(entry)])


@pytest.mark.usefixtures("released")
def test_another_host_cancels_the_analysis(here, there, promoting):
    """It sees only the bucket; the promoter says who asked and why."""
    there.pull()
    with promoting(2) as analysis:
        release = there.rollback("digits", reason="the pager rang", expected=3)

    assert release.version == 2
    assert (live(here), live(there), here.current().version) == (2, 2, 2)
    assert f"{CANCELLED}: the pager rang" in analysis.said
    # The canary is loaded, its analysis is cancelled.
    assert steps(here) == ["intent", "placed", "loaded", "loaded", "undone"]
    assert requests_in(here) == 1
    assert (here.releases.versions(), here.releases.stray()) == ((1, 2), ())
    assert problems(here) + problems(there) == []


@pytest.mark.usefixtures("released")
def test_it_goes_on_to_the_release_that_was_asked_for(here, there, promoting):
    """First the promoter rolls back, then the host that asked takes the lease itself."""
    there.pull()
    with promoting(2):
        assert there.rollback("digits", 1).version == 1

    here.recover()
    assert (live(here), live(there)) == (1, 1)
    assert problems(here) + problems(there) == []


def test_the_first_release_leaves_nothing(here, there, promoting):
    """There is no release to name, which is said together with what happened."""
    with (
        promoting(None) as analysis,
        pytest.raises(RepositoryError, match=r"release 1 was cancelled\. Nothing was live before"),
    ):
        there.rollback("digits")

    assert "Nothing is live again on: the primary" in analysis.said
    assert (live(here), here.releases.versions()) == (None, ())


@pytest.mark.usefixtures("released")
def test_host_that_serves_something_else_says_so(here, there, promoting):
    """Its own server was off and could not be brought to what is live."""
    off = replace(there, local=replace(there.local, client=None))
    with (
        promoting(2),
        pytest.raises(RepositoryError, match="cancelled, but this host has release none and not 2"),
    ):
        off.rollback("digits")

    assert (live(here), here.current().version) == (2, 2)


@pytest.mark.usefixtures("released")
@pytest.mark.parametrize(
    ("to", "leave", "message"),
    [
        pytest.param(None, 2, "under way", id="another-was-judged"),
        pytest.param(3, None, "under way", id="to-the-canary"),
        pytest.param(7, None, "has no release 7", id="to-nowhere"),
    ],
)
def test_impossible_rollback_cancels_nothing(here, there, promoting, to, leave, message):
    """The canary passes, and the other servers replicate it."""
    there.pull()
    with promoting(2) as analysis, pytest.raises(RepositoryError, match=message):
        there.rollback("digits", to, expected=leave)

    assert analysis.said.version == here.current().version == live(here) == 3
    assert requests_in(here) == 0


@pytest.mark.usefixtures("released")
def test_request_after_the_last_check_is_found_before_the_commit(
    here, there, promoting, monkeypatch
):
    """The promoter cannot go on past a flag in its lease: the release never becomes live."""
    there.pull()
    request = ObjectJournal.request_cancel

    def request_and_let_it_pass(self, analysing, reason):
        asked = request(self, analysing, reason)
        analysis.passed.set()
        return asked

    monkeypatch.setattr(ObjectJournal, "request_cancel", request_and_let_it_pass)
    with promoting(2) as analysis:
        analysis.checks = False
        assert there.rollback("digits").version == 2

    assert CANCELLED in analysis.said
    assert [e.kind for e in here.journal.read() if e.step == "done"] == ["publish", "publish"]
    assert (here.current().version, live(here), live(there)) == (2, 2, 2)
    assert problems(here) + problems(there) == []


@pytest.mark.usefixtures("released")
def test_request_that_the_promoter_outruns_cancels_nothing(here, there, promoting, monkeypatch):
    """Between its check of the lease and its flag the canary passed: it is refused as busy."""
    there.pull()
    request, switching, refused = ObjectJournal.request_cancel, threading.Event(), threading.Event()
    replicate = FleetServer.replicate

    def request_late(self, analysing, reason):
        analysis.passed.set()
        assert switching.wait(ANALYSIS_S)
        return request(self, analysing, reason)

    def replicate_late(self, release):
        switching.set()
        assert refused.wait(ANALYSIS_S)
        replicate(self, release)

    monkeypatch.setattr(ObjectJournal, "request_cancel", request_late)
    monkeypatch.setattr(FleetServer, "replicate", replicate_late)
    with promoting(2) as analysis:
        with pytest.raises(RepositoryBusyError, match="is at its step 'loaded'"):
            there.rollback("digits")
        refused.set()

    assert (analysis.said.version, requests_in(here)) == (3, 0)


@pytest.mark.usefixtures("released")
def test_once_it_has_passed_a_rollback_is_refused_at_once(here, there, promoting, monkeypatch):
    """While the other servers are changed nobody checks, so nobody can ask."""
    there.pull()
    monkeypatch.setattr(object_repository, "_PATIENCE_S", 0.0)
    replicate, refused = FleetServer.replicate, []

    def replicate_late(self, release):
        with pytest.raises(RepositoryBusyError) as caught:
            there.rollback("digits")
        refused.append(str(caught.value))
        replicate(self, release)

    with promoting(2) as analysis:
        monkeypatch.setattr(FleetServer, "replicate", replicate_late)

    assert "is at its step 'loaded'" in refused[0]
    assert requests_in(here) == 0
    assert analysis.said.version == here.current().version == 3


@pytest.mark.usefixtures("released")
def test_its_own_host_cancels_it_without_storage(here, promoting):
    """Storage is away: what serves is rolled back, and the command says what it could not do."""

    def away(*_):
        raise RepositoryError("storage is away")

    with promoting(2) as analysis, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ObjectStore, "read", away)
        with pytest.raises(RepositoryError, match="storage is away"):
            here.rollback("digits", expected=3)
        assert live(here) == 2

    assert CANCELLED in analysis.said


@pytest.mark.usefixtures("released")
def test_waiting_for_the_promoter_is_limited(here, there, promoting, monkeypatch):
    """A promoter that does not check is named, with its host; it rolls back all the same."""
    there.pull()
    monkeypatch.setattr(object_repository, "_PATIENCE_S", 1.0)
    with promoting(2) as analysis:
        analysis.checks = False
        words = (
            r"by \S+ pid \d+ was cancelled, and is not rolled back after 2 s\. Its host rolls it"
        )
        for _ in range(2):  # asked twice is asked once
            with pytest.raises(RepositoryBusyError, match=words):
                there.rollback("digits")

    assert CANCELLED in analysis.said
    assert (requests_in(here), live(here)) == (1, 2)


@pytest.mark.usefixtures("released")
def test_storage_that_is_away_for_a_moment_cancels_nothing(promoting, monkeypatch):
    """Without it there is no commit either."""
    read, reads, enough = ObjectStore.read, [], threading.Event()

    def fail_at_times(self, key):
        reads.append(key)
        if len(reads) > 4:
            enough.set()
        if len(reads) <= 2:
            raise RepositoryError("storage is away")
        return read(self, key)

    with promoting(2) as analysis:
        monkeypatch.setattr(ObjectStore, "read", fail_at_times)
        assert enough.wait(ANALYSIS_S)

    assert analysis.said.version == 3
