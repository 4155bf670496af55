"""Any host can end the watching of a canary, also one that sees only the bucket; no Triton."""

import errno
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest

from enginegate.decision import Release
from enginegate.errors import EnginegateError, RepositoryBusyError, RepositoryError
from enginegate.repository import Fleet, ObjectRepository
from enginegate.repository.rollout import cancel_request, rollout_state
from enginegate.repository.rollout.fleet_server import FleetServer
from enginegate.repository.rollout.rollout_state import RolloutState
from enginegate.repository.store.object_client import ObjectStore
from tests.fakes.hosts import live, problems, steps, wait_for_window

WINDOW_S = 60.0


@dataclass
class Window:
    """A canary's window that a test lets pass; ``said`` is the release, or why there is none."""

    rollouts: RolloutState
    passed: threading.Event = field(default_factory=threading.Event)
    looks: bool = True
    said: Release | str = ""

    def hold(self, seconds):
        deadline = time.monotonic() + seconds
        while not self.passed.wait(0.02):
            assert time.monotonic() < deadline, "nobody ended the window"
            if self.looks:
                self.rollouts.check_goes_on("digits")


@pytest.fixture
def here(store, host):
    """It promotes, to two servers."""
    one, two = host("one").local, host("two").local
    fleet = Fleet(one, (FleetServer("two", two, one),), WINDOW_S)
    return ObjectRepository(store, "digits", fleet)


@pytest.fixture
def there(host):
    """Another host, with a server of its own; it follows."""
    return host("there")


@pytest.fixture
def released(here, package):
    """Releases 1 and 2, whose windows passed."""
    here.publish(package(1.0), expected=None)
    here.publish(package(2.0), expected=1)


@pytest.fixture
def promoting(here, package):
    """Publish on `here` meanwhile: the block runs in the window, which ends with it."""

    @contextmanager
    def run(expected):
        window = Window(RolloutState(here.root))
        watching = replace(here, local=replace(here.local, hold=window.hold))

        def publish():
            try:
                window.said = watching.publish(package(9.0), expected=expected)
            except EnginegateError as error:
                window.said = str(error)

        promotion = threading.Thread(target=publish)
        promotion.start()
        try:
            wait_for_window(here)
            yield window
        finally:
            window.passed.set()
            promotion.join()

    return run


@pytest.mark.usefixtures("released")
def test_another_host_ends_the_window(here, there, promoting, caplog):
    """It sees only the bucket; the promoter says who asked and why."""
    there.pull()
    with promoting(2) as window:
        release = there.rollback("digits", reason="the pager rang", expected=3)

    assert release.version == 2
    assert (live(here), live(there), here.current().version) == (2, 2, 2)
    assert "a rollback was asked for while it was watched" in window.said
    assert ": the pager rang" in caplog.text
    assert steps(here) == ["intent", "placed", "loaded", "undone"]
    assert problems(here) + problems(there) == []


@pytest.mark.usefixtures("released")
def test_it_goes_on_to_the_release_that_was_asked_for(here, there, promoting):
    """First the promoter goes back, then the host that asked takes its own turn."""
    there.pull()
    with promoting(2):
        assert there.rollback("digits", 1).version == 1

    here.recover()
    assert (live(here), live(there)) == (1, 1)
    assert problems(here) + problems(there) == []


def test_the_first_release_leaves_nothing(here, there, promoting):
    """There is no release to name, which is said together with what happened."""
    with (
        promoting(None) as window,
        pytest.raises(RepositoryError, match=r"release 1 was ended\. Nothing was live before"),
    ):
        there.rollback("digits")

    assert "Nothing is live again on: the lead" in window.said
    assert (live(here), here.releases.versions()) == (None, ())


@pytest.mark.usefixtures("released")
def test_a_host_that_serves_something_else_says_so(here, there, promoting):
    """Its own server was off and could not be brought to what is live."""
    off = replace(there, local=replace(there.local, client=None))
    with (
        promoting(2),
        pytest.raises(RepositoryError, match="ended, but this host has release none and not 2"),
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
def test_what_cannot_be_done_ends_nothing(here, there, promoting, to, leave, message):
    """The roll-out holds, and the other servers follow."""
    there.pull()
    with promoting(2) as window:
        with pytest.raises(RepositoryError, match=message):
            there.rollback("digits", to, expected=leave)
        time.sleep(3 * cancel_request._LOOK_S)

    assert window.said.version == here.current().version == live(here) == 3


@pytest.mark.usefixtures("released")
def test_asked_for_after_the_last_look_it_goes_back_all_the_same(here, there, promoting):
    """The roll-out has held by then: the release becomes live, and is left as any other."""
    there.pull()
    with promoting(2) as window:
        window.looks = False
        threading.Timer(2 * cancel_request._LOOK_S, window.passed.set).start()
        assert there.rollback("digits").version == 2

    assert here.store.read("digits/end.json") is not None
    assert window.said.version == 3
    assert [e.kind for e in here.journal.read() if e.step == "done"][-2:] == [
        "publish",
        "rollback",
    ]
    assert (here.current().version, live(there)) == (2, 2)


@pytest.mark.usefixtures("released")
def test_once_it_has_held_nobody_asks(here, there, promoting, monkeypatch):
    """While the others are told nobody looks: refused at once, and not as one that ends."""
    there.pull()
    monkeypatch.setattr(cancel_request, "_PATIENCE_S", 0.0)
    take, refused = FleetServer.take, []

    def take_late(self, release):
        with pytest.raises(RepositoryBusyError) as caught:
            there.rollback("digits")
        refused.append(str(caught.value))
        take(self, release)

    with promoting(2) as window:
        monkeypatch.setattr(FleetServer, "take", take_late)

    assert "is at its step 'loaded'" in refused[0]
    assert here.store.read("digits/end.json") is None
    assert window.said.version == here.current().version == 3


@pytest.mark.usefixtures("released")
def test_its_own_host_ends_it_without_storage(here, promoting):
    """Storage is away: what serves goes back, and the command says what it could not do."""

    def away(*_):
        raise RepositoryError("storage is away")

    with promoting(2) as window, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ObjectStore, "read", away)
        with pytest.raises(RepositoryError, match="storage is away"):
            here.rollback("digits", expected=3)
        assert live(here) == 2

    assert "a rollback was asked for while it was watched" in window.said


@pytest.mark.usefixtures("released")
def test_a_full_disk_delays_the_end(here, there, promoting, monkeypatch, caplog):
    """The promoter could not note that it was asked: it tries again, and says so once."""
    there.pull()
    monkeypatch.setattr(cancel_request, "_PATIENCE_S", 10.0)
    write, full = rollout_state.write_file, []

    def fail_at_first(path, content):
        if "fleet-end" in path.name and len(full) < 2:
            full.append(path)
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    monkeypatch.setattr(rollout_state, "write_file", fail_at_first)
    with promoting(2) as window:
        assert there.rollback("digits").version == 2

    assert "a rollback was asked for while it was watched" in window.said
    assert caplog.text.count("could not be handed on") == 1
    assert (live(here), len(full)) == (2, 2)


@pytest.mark.usefixtures("released")
@pytest.mark.parametrize("held", [False, True])
def test_nobody_waits_for_ever(there, promoting, monkeypatch, held):
    """A promoter that does not look is named, with its host and with what it does next."""
    there.pull()
    monkeypatch.setattr(cancel_request, "_PATIENCE_S", 1.0)
    then = "The canary had held by then" if held else "It goes back at its next look"
    write, take, refused = ObjectStore.write, FleetServer.take, threading.Event()

    def write_at_the_end(self, key, content):
        write(self, key, content)
        if held and key.endswith("end.json"):
            window.passed.set()

    def take_late(self, release):
        assert refused.wait(WINDOW_S)
        take(self, release)

    monkeypatch.setattr(ObjectStore, "write", write_at_the_end)
    monkeypatch.setattr(FleetServer, "take", take_late)
    with promoting(2) as window:
        window.looks = False
        said = rf"by \S+ pid \d+ was asked to end, and has not in 2 s\. {then}"
        with pytest.raises(RepositoryBusyError, match=said):
            there.rollback("digits")
        refused.set()


@pytest.mark.usefixtures("released")
def test_storage_that_is_away_for_a_moment_ends_nothing(here, promoting, monkeypatch):
    """Nor does what was asked of an earlier roll-out."""
    asked = cancel_request.CancelRequest(operation="an earlier one", by="somebody")
    here.store.write("digits/end.json", asked.pretty_json())
    read, looks, enough = ObjectStore.read, [], threading.Event()

    def fail_at_times(self, key):
        if not key.endswith("end.json"):
            return read(self, key)
        looks.append(key)
        if len(looks) > 4:
            enough.set()
        if len(looks) <= 2:
            raise RepositoryError("storage is away")
        return read(self, key)

    monkeypatch.setattr(ObjectStore, "read", fail_at_times)
    with promoting(2) as window:
        assert enough.wait(WINDOW_S)

    assert window.said.version == 3
