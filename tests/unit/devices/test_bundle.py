"""Evidence in one file: nothing is lost, changed, or written where it does not belong."""

import shutil
import zipfile

import pytest

from enginegate.candidate import Engine, FileDigest
from enginegate.devices import PartStore, StoredEngine, read_bundle, write_bundle
from enginegate.errors import InputError, TamperedError
from enginegate.workspace import Workspace
from tests.fakes.evidence import INT8
from tests.fakes.parts import part


@pytest.fixture
def there(tmp_path):
    return Workspace(tmp_path / "there")


@pytest.fixture
def here(tmp_path):
    return Workspace(tmp_path / "here")


@pytest.fixture
def bundle(there, tmp_path):
    path = tmp_path / "l4.evidence"
    write_bundle(part(there), there, path)
    return path


def rewritten(bundle, **contents):
    """The archive with other contents; None leaves a file out."""
    target = bundle.with_name("rewritten")
    with zipfile.ZipFile(bundle) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            content = contents.get(info.filename.rpartition("/")[2].replace(".", "_"), b"")
            if content is not None:
                new.writestr(info.filename, content or old.read(info))
    return target


def test_part_comes_whole_to_another_workspace(bundle, here, there):
    """Record, engine and golden answers; a second import changes nothing."""
    (made,) = PartStore(there).parts()

    for _ in range(2):
        assert read_bundle(bundle, here) == made
    found = PartStore(here).find(made.identity)
    assert found == made
    assert PartStore(here).engine(found, INT8).folder.is_relative_to(here.root)


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 0, 1)])
@pytest.mark.parametrize("content", [b"a plan for an L4", b"a plan for any CPU"])
def test_parts_of_one_plan_outlive_each_other(bundle, here, tmp_path, order, content):
    """Both kinds built one plan, for so many seconds each, and their engines answer differently."""
    elsewhere = Workspace(tmp_path / "elsewhere")
    second = part(elsewhere, "a10", content=content, build_s=2.0, answers=b"other answers")
    write_bundle(second, elsewhere, tmp_path / "a10.evidence")
    bundles = (bundle, tmp_path / "a10.evidence")

    made = [read_bundle(bundles[each], here) for each in order]

    store = PartStore(here)
    for each in made:
        assert store.find(each.identity) == each
        again = write_bundle(each, here, tmp_path / "again")
        assert again == FileDigest.of(bundles[each.device == "a10"])
    folders = {store.engine(each, INT8).folder for each in made}
    assert {Engine.read(folder / "manifest.json").build_s for folder in folders} == {1.0, 2.0}


def test_import_leaves_what_this_machine_built(bundle, here):
    """The plan's own folder is a build of this workspace, and its part counts on."""
    own = part(here, "a10", build_s=2.0, answers=b"other answers")

    brought = read_bundle(bundle, here)

    assert PartStore(here).find(own.identity) == own
    assert PartStore(here).find(brought.identity) == brought


def test_damaged_engine_is_brought_again(bundle, here):
    made = read_bundle(bundle, here)
    path = PartStore(here).engine(made, INT8).folder / "model.onnx"
    path.chmod(0o644)
    path.write_bytes(b"something else")

    assert read_bundle(bundle, here) == made
    assert PartStore(here).find(made.identity) == made


def test_same_part_is_the_same_archive(bundle, there, tmp_path):
    """So its digest can be told by telephone."""
    (made,) = PartStore(there).parts()

    again = write_bundle(made, there, tmp_path / "again")

    assert again == FileDigest.of(bundle)


def test_other_archive_than_was_exported_is_refused(bundle, here):
    digest = FileDigest.of(bundle).sha256
    read_bundle(bundle, here, sha256=digest[:16].upper())

    with pytest.raises(TamperedError, match="not the archive that was exported"):
        read_bundle(bundle, here, sha256="0" * 16)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"model_onnx": b"a plan for an H1"}, id="other-bytes"),
        pytest.param({"model_onnx": b"a longer plan for an L4"}, id="other-size"),
        pytest.param({"model_onnx": None}, id="missing"),
        pytest.param({"manifest_json": b"{}"}, id="manifest"),
    ],
)
def test_changed_file_leaves_no_evidence(bundle, here, change):
    """Neither the part nor the engine's folder."""
    with pytest.raises(TamperedError):
        read_bundle(rewritten(bundle, **change), here)

    assert not list(PartStore(here).parts())
    assert not list(here.engines.glob("[!.]*"))


@pytest.mark.parametrize("name", ["../../../escaped", "/srv/escaped", "a/../../escaped"])
def test_engine_that_names_a_file_elsewhere_is_refused(bundle, there, here, name, tmp_path):
    """The record itself is what the archive's author chose."""
    (made,) = PartStore(there).parts()
    folder = there.engines / made.engines[INT8.name].folder
    engine = Engine.read(folder / "manifest.json")
    escaping = engine.model_copy(update={"beside": {name: engine.file}})
    manifest = escaping.pretty_json()
    (folder / "manifest.json").write_bytes(manifest)
    stored = StoredEngine(folder=folder.name, manifest=FileDigest.of(folder / "manifest.json"))
    lying = made.model_copy(update={"engines": {INT8.name: stored}})
    path = rewritten(bundle, part_json=lying.pretty_json(), manifest_json=manifest)

    with pytest.raises(TamperedError, match="not its own"):
        read_bundle(path, here)

    assert not list(tmp_path.rglob("escaped"))


def test_file_that_is_no_evidence_is_named(here, tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("not an archive")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as other:
        other.writestr("readme", "hello")

    for path in (text, tmp_path / "other.zip"):
        with pytest.raises(InputError, match="is not evidence"):
            read_bundle(path, here)
    with pytest.raises(InputError, match="cannot be read"):
        read_bundle(tmp_path / "missing", here)


def test_part_whose_engine_is_gone_is_not_exported(there, tmp_path):
    made = part(there)
    shutil.rmtree(there.engines)

    with pytest.raises((InputError, TamperedError)):
        write_bundle(made, there, tmp_path / "out")
    assert not (tmp_path / "out").exists()
