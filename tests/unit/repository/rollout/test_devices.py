"""A fleet of several kinds of device: each server gets the engine that was judged on its kind."""

from dataclasses import replace

import pytest

from enginegate.errors import RepositoryError
from enginegate.policy.operating import Signing
from enginegate.repository import Layout, ReleaseSigning
from enginegate.repository.rollout.fleet import Fleet
from enginegate.repository.rollout.target import FleetServer
from enginegate.repository.store.release_files import ReleaseFiles
from enginegate.repository.store.removal import forget_old
from enginegate.repository.verify import verify
from enginegate.workspace import Workspace
from tests.fakes.live_triton import FakeTriton


@pytest.fixture
def mixed(package):
    """A release that adds a number on an L4, and another one on an H100."""

    def make(number, *, kinds=("l4", "h100")):
        made = [
            replace(package(number + 10 * place), device=kind) for place, kind in enumerate(kinds)
        ]
        return replace(made[0], further=tuple(made[1:]))

    return make


@pytest.fixture
def l4(repository):
    return replace(repository, device="l4")


@pytest.fixture
def fleet_server(l4, tmp_path):
    """A server of the fleet with a repository of its own."""

    def make(device, name="b"):
        root = tmp_path / name / "live"
        root.mkdir(parents=True)
        own = replace(l4, root=root, client=FakeTriton(root), device=device)
        return FleetServer(name, own, l4)

    return make


def engine_bytes(repository, version):
    layout = Layout(repository.root, "digits")
    release = layout.release(version)
    return (layout.version_folder(version) / "engine.bin").read_text(), release.engine.device


def problems(target):
    return [check.problem for check in verify(target) if check.problem]


def test_server_gets_the_engine_of_its_kind(l4, fleet_server, mixed):
    """One manifest with one digest everywhere; other bytes, answers and promises below it."""
    h100 = fleet_server("h100")
    fleet = Fleet(l4, (h100,))

    release = fleet.publish(mixed(1.0), expected=None)

    there = Layout(h100.repository.root, "digits").release(1)
    assert engine_bytes(l4, 1) == ("1.0", "l4")
    assert engine_bytes(h100.repository, 1) == ("11.0", "h100")
    assert there.digest == release.digest
    assert release.devices == there.devices == ("l4", "h100")
    assert there.engine != release.engine
    assert not list(Layout(h100.repository.root, "digits").folder.rglob("*.engine-*"))
    assert problems(fleet) == []


def test_every_kind_goes_back_to_its_own_engine(l4, fleet_server, mixed):
    """A rollback, and a server whose folder was lost."""
    h100 = fleet_server("h100")
    fleet = Fleet(l4, (h100,))
    fleet.publish(mixed(1.0), expected=None)
    fleet.publish(mixed(2.0), expected=1)

    fleet.rollback("digits", 1)
    assert engine_bytes(h100.repository, 1) == ("11.0", "h100")
    late = fleet_server("h100", "late")
    replace(fleet, servers=(h100, late)).repair()

    assert engine_bytes(late.repository, 1) == ("11.0", "h100")
    assert problems(replace(fleet, servers=(h100, late))) == []


@pytest.mark.parametrize("kinds", [("l4", "h100"), ("l4",)])
def test_server_of_a_kind_without_evidence_is_refused_by_name(l4, fleet_server, mixed, kinds):
    """Before anything changes, on the primary too."""
    fleet = Fleet(
        l4,
        (fleet_server("h100", "a"), fleet_server("t4", "b"))
        if len(kinds) > 1
        else (fleet_server("t4"),),
    )

    with pytest.raises(RepositoryError, match=r"Server 'b' has devices of kind 't4'.*Nothing was"):
        fleet.publish(mixed(1.0, kinds=kinds), expected=None)

    for repository in (l4, *(each.repository for each in fleet.servers)):
        assert not Layout(repository.root, "digits").folder.exists()
        assert not repository.client.loaded


def test_primary_of_another_kind_is_refused(repository, mixed):
    with pytest.raises(RepositoryError, match="no engine that was judged on that kind"):
        replace(repository, device="t4").publish(mixed(1.0), expected=None)


def test_repository_keeps_its_kind(l4, mixed):
    """Its bytes are of that kind: another server needs another folder."""
    l4.publish(mixed(1.0), expected=None)

    with pytest.raises(RepositoryError, match="holds engines for l4, and its server has h100"):
        replace(l4, device="h100").publish(mixed(2.0, kinds=("h100", "l4")), expected=1)
    assert Layout(l4.root, "digits").current().version == 1


def test_bytes_for_other_kinds_go_with_the_release(l4, mixed):
    """Retention and a failed promotion leave nothing of them."""
    layout = Layout(l4.root, "digits")
    for number in (1, 2, 3):
        l4.publish(mixed(float(number)), expected=number - 1 or None)
    assert len(list(layout.folder.rglob("*.engine-h100"))) == 3

    forget_old(layout, 1)
    left = {path.name for path in layout.folder.rglob("*.engine-h100")}
    assert left == {f"{version}.engine-h100" for version in layout.stored_versions()}

    l4.client.refuses = {4}
    with pytest.raises(RepositoryError, match="release 4 failed"):
        l4.publish(mixed(4.0), expected=3)
    assert not list(layout.folder.rglob("4.engine-*"))


def test_changed_byte_of_any_kind_is_found(l4, mixed):
    """Servers of that kind would be given it later."""
    l4.publish(mixed(1.0), expected=None)
    (spare,) = Layout(l4.root, "digits").folder.rglob("1.engine-h100/engine.bin")
    spare.chmod(0o644)
    spare.write_text("12.0")

    assert any("engine-h100" in problem for problem in problems(l4))


def test_signature_holds_in_repositories_of_every_kind(l4, fleet_server, mixed, tmp_path):
    """It is on the manifest, which states every digest."""
    signing = ReleaseSigning.of(Signing(required=True), Workspace(tmp_path / "workspace"))
    signed = replace(l4, signing=signing)
    h100 = fleet_server("h100")
    h100 = FleetServer("b", replace(h100.repository, signing=signing), signed)

    Fleet(signed, (h100,)).publish(mixed(1.0), expected=None)

    layout = Layout(h100.repository.root, "digits")
    assert signing.check(ReleaseFiles(layout, layout.release(1)).signed()) == ""
