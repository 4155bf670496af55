"""What one host has made, another fetches from object storage; faults cost a build there."""

from hashlib import sha256

import pytest

from enginegate.candidate import FileDigest
from enginegate.content_store import make_once
from enginegate.errors import TamperedError
from enginegate.object_storage import SharedFolders, fetch_or_make
from enginegate.object_storage.folders import FolderFiles
from tests.fakes.fault_proxy import Fault

NAME = "d" * 64


def read(folder):
    if (folder / "engine").read_bytes() != b"engine":
        raise TamperedError("another engine")
    return "read"


@pytest.fixture
def host(any_store, tmp_path, monkeypatch):
    """Make the folder on a host of that name; what the host did, in order."""
    monkeypatch.setenv("ENGINEGATE_STORE", any_store.url)

    def want(name):
        done = []

        def make(folder):
            assert list(folder.iterdir()) == []
            (folder / "engine").write_bytes(b"engine")
            (folder / "tables").mkdir()
            (folder / "tables" / "ranges").write_bytes(b"ranges")
            done.append("made")
            return "made"

        make = fetch_or_make(NAME, "engines", read=read, make=make)
        found = make_once(tmp_path / name / NAME, read=read, make=make, wait_s=5)
        assert read(found.folder) == "read"
        assert (found.folder / "tables" / "ranges").read_bytes() == b"ranges"
        return done

    return want


def test_folder_is_made_by_the_first_host_alone(host, any_store):
    """Every other one fetches it whole."""
    assert (host("a"), host("b"), host("b")) == (["made"], [], [])
    assert len(any_store.keys("engines/")) == 3


@pytest.mark.parametrize("content", [b"altered", None], ids=["altered", "missing"])
def test_damaged_folder_is_made_here(host, any_store, caplog, content):
    """And the log names the object."""
    host("a")
    key = f"engines/{NAME}/{sha256(b'engine').hexdigest()}"
    any_store.delete(key) if content is None else any_store.write(key, content)

    assert host("b") == ["made"]
    assert key in caplog.text


def test_two_hosts_that_make_one_folder_at_once(any_store, tmp_path):
    """The slower one's files, of other bytes, leave alone those of the list that is there."""
    folders = SharedFolders(any_store, "engines")
    for name in ("fast", "slow", "third"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "engine").write_bytes(name.encode())

    class Late(type(any_store)):
        """Another host's list appears after this one looked for it."""

        def upload(self, path, key):
            folders.offer(NAME, tmp_path / "fast")
            super().upload(path, key)

    SharedFolders(Late(any_store.url), "engines").offer(NAME, tmp_path / "slow")

    assert folders.fetch(NAME, tmp_path / "third")
    assert (tmp_path / "third" / "engine").read_bytes() == b"fast"


def test_folder_of_an_older_list(any_store, tmp_path):
    """Its objects are named after their paths."""
    (tmp_path / "engine").write_bytes(b"engine")
    any_store.write(f"engines/{NAME}/engine", b"engine")
    listed = FolderFiles(files={"engine": FileDigest.of(tmp_path / "engine")})
    any_store.write(f"engines/{NAME}.files.json", listed.pretty_json())

    assert SharedFolders(any_store, "engines").fetch(NAME, tmp_path / "there")
    assert (tmp_path / "there" / "engine").read_bytes() == b"engine"


def test_list_that_leaves_its_folder_is_refused(host, any_store, caplog):
    """Whoever may write there still cannot name a file outside."""
    host("a")
    key = f"engines/{NAME}.files.json"
    any_store.write(key, any_store.read(key).content.replace(b"tables/ranges", b"../ranges"))

    assert host("b") == ["made"]
    assert "names '../ranges'" in caplog.text


def test_storage_that_is_away_costs_a_build(host, faulty, monkeypatch, caplog):
    """Nothing fails; the next host makes it and shares it."""
    store, proxy = faulty
    monkeypatch.setattr("enginegate.object_storage.client._WAITS_S", ())
    proxy.add(Fault("status", method="", status=503, times=999))
    assert host("a") == ["made"]
    assert "is not shared" in caplog.text
    proxy.faults.clear()
    assert (host("b"), host("c")) == (["made"], [])
    assert SharedFolders(store, "engines").store.read(f"engines/{NAME}.files.json")
