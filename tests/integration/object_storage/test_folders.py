"""What one host has made, another fetches from object storage; faults cost a build there."""

import pytest

from enginegate.content_store import make_once
from enginegate.errors import TamperedError
from enginegate.object_storage import SharedFolders, fetch_or_make
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
    key = f"engines/{NAME}/engine"
    any_store.delete(key) if content is None else any_store.write(key, content)

    assert host("b") == ["made"]
    assert key in caplog.text


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
