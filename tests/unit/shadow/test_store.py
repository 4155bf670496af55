import os
import shutil
import stat
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from enginegate.errors import DataError, InputError
from enginegate.shadow import (
    expire_samples,
    is_sample,
    latest_sample,
    read_traffic_sample,
    sample_info,
)
from enginegate.shadow.redaction import Preparation
from enginegate.shadow.sample import SampleInfo, SampleOrigin
from enginegate.shadow.store import new_sample

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)


def test_sample_is_read_as_it_was_written(kept, block_of):
    """Rows keep values, types, versions, arrival and stage times; batches are one request."""
    path = kept(block_of(2, at=5), block_of(1, at=9), one_in=10)

    sample = read_traffic_sample(path)

    assert is_sample(path)
    assert (sample.info.requests, sample.info.rows, sample.info.model_versions) == (2, 3, {3: 3})
    np.testing.assert_array_equal(sample.data.inputs["x"][1], np.arange(4, 8) + 5)
    assert sample.data.inputs["x"].dtype == np.float32
    np.testing.assert_array_equal(sample.outputs["y"], 2 * sample.data.inputs["x"])
    assert sample.data.ids.tolist() == ["0", "1", "2"]
    assert sample.request_ids.tolist() == ["r5", "r5", "r9"]
    assert sample.requests.tolist() == [0, 0, 1]
    assert sample.data.labels is None
    assert sample.stages_us["queue"].tolist() == [5.0, 5.0, 9.0]
    np.testing.assert_allclose(sample.arrivals_s, [0.0, 0.004])
    np.testing.assert_allclose(sample.replay_s, [0.0, 0.0004])


@pytest.mark.parametrize("dtype", ["float16", "float64", "bool", "int8", "uint8", "int64"])
def test_every_type_survives(kept, block_of, dtype):
    """Whatever a model takes or gives comes back in its own type, scalars included."""
    x = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    y = np.array([1, 0]).astype(dtype)

    sample = read_traffic_sample(kept(replace(block_of(2), inputs={"x": x}, outputs={"y": y})))

    assert sample.data.inputs["x"].dtype == sample.outputs["y"].dtype == np.dtype(dtype)
    np.testing.assert_array_equal(sample.data.inputs["x"], x)
    np.testing.assert_array_equal(sample.outputs["y"], y)


def test_shapes_that_are_mixed_are_all_kept(kept, block_of):
    """The most common shape is the sample; others have files of their own, and are in the load."""
    path = kept(block_of(at=1), block_of(at=2, shape=(7,)), block_of(at=3), block_of(at=4))

    sample = read_traffic_sample(path)

    assert [part.rows for part in sample.info.parts] == [3, 1]
    assert sample.data.inputs["x"].shape == (3, 4)
    assert sample.info.parts[1].inputs[0].shape == (-1, 7)
    np.testing.assert_allclose(sample.arrivals_s, [0.0, 0.001, 0.002, 0.003])


def test_description_of_a_sample(kept, block_of):
    """Its description in words holds counts and shapes, and nothing of the values."""
    lines = dict(sample_info(kept(block_of(2, at=5), one_in=10)).lines())

    assert lines["requests"] == "1 (2 rows), one in 10"
    assert lines["tensors"] == "x: float32[batch, 4], y: float32[batch, 4] (2 rows)"
    assert lines["model versions"] == "3 (2 rows)"
    assert (lines["lost"], lines["redacted"], lines["not written"]) == ("0", "nothing", "nothing")


def test_too_many_shapes_are_counted_as_lost(kept, block_of):
    """Beyond 16 kinds of shapes rows are left out, and the sample says how many."""
    path = kept(*(block_of(shape=(size,)) for size in range(1, 21)))

    info = sample_info(path)

    assert len(info.parts) == 16
    assert info.lost == 4
    assert "shapes" in info.losses[0]


def test_large_samples_stay_on_disk(kept, block_of, monkeypatch):
    """Beyond a size arrays are mapped, from files that are not there any more."""
    path = kept(*(block_of(8, shape=(64,), at=at) for at in range(300)))
    plain = read_traffic_sample(path)
    monkeypatch.setattr("enginegate.shadow.store._IN_MEMORY_BYTES", 1000)
    before = sorted(path.iterdir())

    mapped = read_traffic_sample(path)

    assert isinstance(mapped.data.inputs["x"], np.memmap)
    assert mapped.data.sha256 == plain.data.sha256
    assert len(mapped.data) == 2400
    assert sorted(path.iterdir()) == before


def test_only_the_owner_can_read_it(kept, block_of):
    """Folders are 0700 and files 0600, whatever the umask."""
    before = os.umask(0)
    try:
        path = kept(block_of())
    finally:
        os.umask(before)

    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}


def test_failure_leaves_nothing(home, block_of):
    """A recording that breaks off is not there, not even in part."""

    def interrupted():
        with new_sample(home / "m-1", SampleOrigin("a test", "m", NOW), Preparation()) as writer:
            writer.add(block_of())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    assert list(home.iterdir()) == []


def test_empty_recording_is_an_error(home):
    """An empty recording names the first damage and says what to do."""
    with (
        pytest.raises(DataError, match=r"(?s)no request was recorded. 1 were lost, first: half"),
        new_sample(home / "m-1", SampleOrigin("a test", "m", NOW), Preparation()) as writer,
    ):
        writer.add_loss("half an object")

    assert list(home.iterdir()) == []


@pytest.mark.parametrize("harm", ["cut", "flip", "missing", "description"])
def test_damaged_sample_is_refused(kept, block_of, harm):
    """A file that was cut, changed or lost is named, never read as if it were whole."""
    path = kept(block_of(100))
    part = path / "part-0.parquet"
    content = part.read_bytes()
    if harm == "cut":
        part.write_bytes(content[: len(content) // 2])
    elif harm == "flip":
        part.write_bytes(content[:50] + bytes([content[50] ^ 1]) + content[51:])
    elif harm == "missing":
        part.unlink()
    else:
        part = path / "sample.json"
        part.write_text(part.read_text()[:-20])

    with pytest.raises(InputError, match=part.name):
        read_traffic_sample(path)


def test_newest_sample_of_a_model(home, kept, block_of):
    """Of samples recorded live the newest counts; other models' and imports' folders do not."""
    kept(block_of(), name="m-1", when=NOW)
    kept(block_of(), name="m-2", when=NOW + timedelta(hours=1))
    kept(block_of(), name="m-other-1", model="m-other", when=NOW + timedelta(hours=2))

    assert latest_sample(home, "m") == home / "m-2"
    assert latest_sample(home, "nobody") is None


@pytest.fixture
def other_process(monkeypatch):
    """Another process that expires the same folder: a sample vanishes just before it is read."""
    read = SampleInfo.read

    def late(path):
        shutil.rmtree(path.parent)
        return read(path)

    monkeypatch.setattr(SampleInfo, "read", late)


@pytest.mark.usefixtures("other_process")
def test_vanished_sample_is_not_the_newest(home, kept, block_of):
    """Whoever expires samples meanwhile does not make the search for the newest fail."""
    kept(block_of(), name="m-1", when=NOW)

    assert latest_sample(home, "m") is None


class TestExpire:
    def test_old_samples_go(self, home, kept, block_of):
        """What is older than the limit is deleted, by the time it was recorded."""
        old = kept(block_of(), name="m-1", when=NOW - timedelta(days=31))
        young = kept(block_of(), name="m-2", when=NOW - timedelta(days=29))

        assert expire_samples(home, 30, NOW) == (old,)
        assert not old.exists()
        assert young.is_dir()
        assert expire_samples(home, 30, NOW) == ()

    def test_damaged_samples_expire_too(self, home, kept, block_of):
        """A damaged description does not keep a sample for ever: its file's time counts."""
        path = kept(block_of())
        (path / "sample.json").write_text("{")
        loose = home / "old.npz"
        loose.write_bytes(b"")
        for place in (path, loose):
            os.utime(place, (NOW.timestamp() - 40 * 86400,) * 2)

        assert set(expire_samples(home, 30, NOW)) == {path, loose}

    def test_half_written_samples_expire_after_a_day(self, home):
        """Half-written folders hold user data as well; one still at work is younger."""
        stale, fresh, notes = home / ".m-1.abc.tmp", home / ".m-2.abc.tmp", home / ".tracing"
        for folder, days in ((stale, 2), (fresh, 0.1), (notes, 99)):
            folder.mkdir(parents=True)
            os.utime(folder, (NOW.timestamp() - days * 86400,) * 2)

        assert expire_samples(home, 30, NOW) == (stale,)

    @pytest.mark.usefixtures("other_process")
    def test_another_process_may_be_first(self, home, kept, block_of):
        """A sample that vanishes while it is looked at was deleted by somebody else."""
        kept(block_of(), when=NOW - timedelta(days=31))

        assert expire_samples(home, 30, NOW) == ()

    def test_two_processes_may_delete_one_sample(self, home, kept, block_of, monkeypatch):
        """A file that is gone already does not keep the others of its sample."""
        old, unlink, first = kept(block_of(), when=NOW - timedelta(days=31)), os.unlink, []

        def late(path, **where):
            unlink(path, **where)
            if not first:
                first.append(path)
                raise FileNotFoundError(path)

        monkeypatch.setattr(os, "unlink", late)

        assert expire_samples(home, 30, NOW) == (old,)
        assert first
        assert not old.exists()

    def test_missing_folder_expires_nothing(self, tmp_path):
        """A folder that is not there has nothing to delete."""
        assert expire_samples(tmp_path / "none", 30, NOW) == ()

    def test_links_are_not_followed(self, home, tmp_path):
        """A link is deleted, never what it points to."""
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "precious").write_text("")
        home.mkdir()
        (home / "m-1").symlink_to(outside)
        os.utime(outside, (0, 0))

        expire_samples(home, 30, NOW)

        assert (outside / "precious").is_file()
        assert not (home / "m-1").is_symlink()
