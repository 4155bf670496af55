"""Reading data: what fits, and what is refused with the sample it is in."""

import io
import zipfile

import numpy as np
import pytest

from enginegate.candidate import TensorSpec
from enginegate.data import DataSet, read_data, write_data
from enginegate.errors import DataError
from enginegate.machine import free_memory

IMAGE = TensorSpec(name="image", dtype="float32", shape=(-1, 2))


def arrays(**changes):
    base = {
        "input.image": np.arange(12, dtype=np.float32).reshape(6, 2),
        "label": np.arange(6) % 3,
        "slice.light": np.array(["day", "night"] * 3),
        "id": np.array([f"s{i}" for i in range(6)]),
    }
    return {name: array for name, array in (base | changes).items() if array is not None}


@pytest.fixture
def saved(tmp_path):
    def save(**changes):
        np.savez(tmp_path / "data.npz", **arrays(**changes))
        return tmp_path / "data.npz"

    return save


def test_archive_and_folder_have_one_digest(saved, tmp_path):
    """The digest is of the content, not of the form it is kept in."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name, array in arrays().items():
        np.save(folder / f"{name}.npy", array)

    assert read_data(folder).sha256 == read_data(saved()).sha256


def test_data_set_round_trips(saved, tmp_path):
    """Written and read again it is the same, and only its owner can read the file."""
    data = read_data(saved())

    write_data(data, tmp_path / "again.npz")

    assert read_data(tmp_path / "again.npz").sha256 == data.sha256
    assert (tmp_path / "again.npz").stat().st_mode & 0o777 == 0o600


def test_changed_value_changes_the_digest(saved):
    """Evidence made on other data cannot be taken for this data's."""
    before = read_data(saved()).sha256
    image = arrays()["input.image"].copy()
    image[3, 1] += 1e-6

    assert read_data(saved(**{"input.image": image})).sha256 != before


def test_batches_cover_every_sample_once(saved):
    """The last batch is smaller, nothing is repeated or lost."""
    sizes = [len(batch["image"]) for batch in read_data(saved()).batches(4)]

    assert sizes == [4, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": np.array([0.0, np.nan, 1, 2, 0, 1])}, "label must hold finite numbers"),
        ({"label": np.arange(5)}, "differ in length"),
        ({"input.image": None}, "holds no input"),
        ({"id": np.array(["a"] * 6)}, "repeats values"),
        ({"label": np.array([None] * 6, dtype=object)}, "pickled arrays are refused"),
        ({name: array[:0] for name, array in arrays().items()}, "holds no samples"),
    ],
)
def test_malformed_data_is_refused(saved, changes, message):
    """The message names the file and what is wrong with it."""
    with pytest.raises(DataError, match=f"(?s)data.npz.*{message}"):
        read_data(saved(**changes))


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 cut short"])
def test_corrupt_file_is_refused(tmp_path, content):
    """A truncated upload gives a message, not a traceback."""
    path = tmp_path / "data.npz"
    path.write_bytes(content)

    with pytest.raises(DataError, match=r"data\.npz cannot be read"):
        read_data(path)


def test_missing_data_points_to_the_policy(tmp_path):
    """The policy is where the path comes from."""
    with pytest.raises(DataError, match=r"policy's \[data\] names it"):
        read_data(tmp_path / "none.npz")


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((6, 3), np.float32), r"has shape \(6, 3\)"),
        (np.zeros((6, 2), np.float64), "is float64"),
        (np.where(np.arange(12).reshape(6, 2) == 7, np.nan, 0).astype(np.float32), "sample 3"),
    ],
)
def test_data_that_does_not_fit_the_model_is_refused(saved, image, message):
    """Shape, type and finiteness are checked before anything runs."""
    data = read_data(saved(**{"input.image": image}))

    with pytest.raises(DataError, match=message):
        data.check_fits((IMAGE,))


def test_inputs_are_matched_by_name(saved):
    """Both lists are shown, so that the typo is visible."""
    data: DataSet = read_data(saved())

    with pytest.raises(DataError, match=r"\['image'\].*\['pixels'\]"):
        data.check_fits((IMAGE.model_copy(update={"name": "pixels"}),))


class TestTargets:
    @pytest.mark.parametrize(
        "label",
        [
            pytest.param(np.arange(3.0), id="numbers"),
            pytest.param(np.zeros((3, 4, 4), np.int64), id="pixels"),
        ],
    )
    def test_label_of_the_only_output_may_have_any_form(self, tmp_path, label):
        """It is kept, and is the same data when it is written again."""
        np.savez(tmp_path / "data.npz", **{"input.x": np.zeros((3, 2), np.float32), "label": label})
        data = read_data(tmp_path / "data.npz")

        write_data(data, tmp_path / "again.npz")

        assert data.labels is None
        np.testing.assert_array_equal(data.targets[""], label)
        assert read_data(tmp_path / "again.npz").sha256 == data.sha256

    def test_labels_of_single_outputs(self, tmp_path):
        """``label.NAME`` holds what one output should be, and is part of the data's digest."""
        arrays = {"input.x": np.zeros((3, 2), np.float32), "label.price": np.arange(3.0)}
        np.savez(tmp_path / "one.npz", **arrays)
        np.savez(tmp_path / "other.npz", **{**arrays, "label.price": np.ones(3)})

        one, other = (read_data(tmp_path / name) for name in ("one.npz", "other.npz"))

        assert one.targets["price"].tolist() == [0.0, 1.0, 2.0]
        assert one.labels is None
        assert one.rows(1, 3).targets["price"].tolist() == [1.0, 2.0]
        assert one.sha256 != other.sha256

    @pytest.mark.parametrize(
        ("target", "message"),
        [
            pytest.param(np.array([1.0, np.nan, 2.0]), "label.price must hold finite", id="nan"),
            pytest.param(np.array(["a", "b", "c"]), "label.price must hold finite", id="text"),
            pytest.param(np.zeros(2), "differ in length", id="another-length"),
        ],
    )
    def test_bad_labels_are_refused(self, tmp_path, target, message):
        """NaN, text and another length are named with the array they are in."""
        path = tmp_path / "bad.npz"
        np.savez(path, **{"input.x": np.zeros((3, 2), np.float32), "label.price": target})

        with pytest.raises(DataError, match=message):
            read_data(path)


def _header(shape, dtype="<f4"):
    """The beginning of an array file that says it holds this much."""
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        content, {"descr": dtype, "fortran_order": False, "shape": shape}
    )
    return content.getvalue()


def _archive(path, content, *, name="input.image.npy", compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr(name, content)
    return path


@pytest.mark.parametrize(
    "shape", [pytest.param((10**12,), id="values"), pytest.param((10**9, 10**9), id="beyond")]
)
def test_exaggerated_header_is_refused(tmp_path, shape):
    """Nothing is set aside for values that nobody sent."""
    path = _archive(tmp_path / "data.npz", _header(shape) + bytes(64))

    with pytest.raises(DataError, match=r"input\.image\.npy says .* it has 64\. Write it again"):
        read_data(path)


def test_values_without_a_size_are_refused(tmp_path):
    """A million millions of nothing are not samples."""
    path = _archive(tmp_path / "data.npz", _header((10**12,), "|V0"))

    with pytest.raises(DataError, match="which are 0 bytes"):
        read_data(path)


def test_foreign_archive_member_is_refused(tmp_path):
    """An archive that holds something else is not a data set."""
    path = _archive(tmp_path / "data.npz", b"hello", name="README.txt")

    with pytest.raises(DataError, match=r"'README\.txt' does not belong there.*NAME\.npy"):
        read_data(path)


def test_encrypted_member_is_refused(saved):
    """It is said which, instead of asking for a password."""
    path = saved()
    content = bytearray(path.read_bytes())
    for signature, flags in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        content[content.index(signature) + flags] |= 1
    path.write_bytes(content)

    with pytest.raises(DataError, match="is encrypted"):
        read_data(path)


def test_unknown_compression_is_refused(tmp_path):
    """LZMA and its like are not what NumPy writes."""
    path = _archive(tmp_path / "data.npz", _header((1,)) + bytes(4), compression=zipfile.ZIP_LZMA)

    with pytest.raises(DataError, match="compressed by method 14"):
        read_data(path)


@pytest.mark.slow
def test_archive_bomb_is_refused(tmp_path, monkeypatch):
    """A small file that becomes gibibytes is not unpacked, unless its owner says so."""
    path = tmp_path / "data.npz"
    block = bytes(1 << 24)
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("input.image.npy", "w", force_zip64=True) as member,
    ):
        member.write(_header((67 * len(block) // 4,)))
        for _ in range(67):
            member.write(block)
    monkeypatch.setattr("enginegate.data.free_memory", lambda: 1 << 40)

    with pytest.raises(DataError, match=r"to 1\.0 GiB, \d+ times its size.*MAX_ARCHIVE_GIB"):
        read_data(path)
    monkeypatch.setattr("enginegate.data.free_memory", lambda: 1 << 20)
    with pytest.raises(DataError, match=r"1\.0 GiB, and 0\.0 GiB of memory are free"):
        read_data(path)
    monkeypatch.setenv("ENGINEGATE_MAX_ARCHIVE_GIB", "0.5")
    with pytest.raises(DataError, match=r"ENGINEGATE_MAX_ARCHIVE_GIB allows 0\.5"):
        read_data(path)


def test_its_owner_may_allow_what_expands(saved, monkeypatch):
    """The variable is a limit of its own, instead of what is free."""
    monkeypatch.setattr("enginegate.data.free_memory", lambda: 1)
    monkeypatch.setenv("ENGINEGATE_MAX_ARCHIVE_GIB", "1")

    assert len(read_data(saved())) == 6


def test_free_memory_is_known():
    """On Linux, and below what any machine has."""
    assert 1 << 20 < free_memory() < 1 << 46
