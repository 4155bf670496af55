"""Data of any size, a chunk at a time: the same numbers, kept on disk, run once."""

import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from enginegate.data import DataSet
from enginegate.engines import open_engine
from enginegate.errors import DataError
from validation.chunks import (
    compare_chunk,
    followed,
    gather,
    observe_chunk,
    open_comparison,
)
from validation.outputs import OutputSpec

ROOT = Path(__file__).parents[3]


@pytest.fixture
def ready(lab, tmp_path):
    """The lab with folders of its own and 3,000 samples, and FP32's answers to them."""
    asked = (OutputSpec(traits=("confidence", "input_norm")),)
    small = replace(lab, root=tmp_path, data=lab.data.head(3000), asked=asked)
    for size in (1024, 4096):
        for chunk in small.chunks(size):
            observe_chunk(chunk, tmp_path / "noise" / str(size))
    return small


def _compared(lab, size, folder):
    chunks = lab.chunks(size)
    engine = lab.engine(lab.graph, "onnxruntime-int8")
    for chunk in chunks:
        compare_chunk(chunk, engine, folder)
    return gather(folder, chunks, lab.data, 0)


def _written(folder):
    """When each finished file was written; one that is being written is renamed at any time."""
    return {
        path.name: path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.suffix != ".tmp" and path.is_file()
    }


def test_chunks_equal_the_whole(ready, tmp_path):
    """Three chunks give what one gives, traits included; only columns are on disk."""
    parts = _compared(ready, 1024, tmp_path / "parts")
    whole = _compared(ready, 4096, tmp_path / "whole")

    assert len(ready.chunks(1024)) == 3
    assert parts.frame().equals(whole.frame())
    assert np.array_equal(parts.traits["confidence"], whole.traits["confidence"])
    stored = sum(path.stat().st_size for path in (tmp_path / "parts").iterdir())
    assert stored < 3000 * 150


def test_columns_of_many_samples_lie_on_disk(ready, tmp_path, monkeypatch):
    """In files that are gone when nobody reads them any more; their numbers are the same."""
    kept = _compared(ready, 1024, tmp_path / "parts")
    before = _written(tmp_path / "parts")
    monkeypatch.setattr("validation.chunks._ON_DISK_FROM", 0)

    mapped = _compared(ready, 1024, tmp_path / "parts")

    assert isinstance(mapped.kl_nats, np.memmap)
    assert mapped.frame().equals(kept.frame())
    assert _written(tmp_path / "parts") == before


def test_engine_is_opened_once_for_all_its_chunks(ready, tmp_path, monkeypatch):
    """And not at all where every chunk is kept already."""
    opened, engine = [], ready.engine(ready.graph, "onnxruntime-int8")

    def counted(*engine):
        opened.append(engine)
        return open_engine(*engine)

    monkeypatch.setattr("validation.chunks.open_engine", counted)
    for _ in range(2):
        with open_comparison(engine) as compare_on:
            for chunk in ready.chunks(1024):
                compare_on(chunk, tmp_path / "once")

    whole = gather(tmp_path / "once", ready.chunks(1024), ready.data, 0)
    assert len(opened) == 1
    assert whole.frame().equals(_compared(ready, 1024, tmp_path / "apart").frame())


def test_killed_run_resumes_at_the_missing_chunk(ready, tmp_path):
    """A chunk that is missing or cut short is run again, and no other."""
    folder = tmp_path / "parts"
    before = _compared(ready, 1024, folder)
    first, second, third = sorted(folder.iterdir())
    untouched = _written(folder)[second.name]
    first.unlink()
    third.write_bytes(third.read_bytes()[:500])

    after = _compared(ready, 1024, folder)

    assert after.frame().equals(before.frame())
    assert _written(folder)[second.name] == untouched
    assert third.stat().st_size > 500


_CHILD = """
import pickle, sys, time
from pathlib import Path
from validation.chunks import compare_chunk

chunks, engine, folder = pickle.loads(Path(sys.argv[1]).read_bytes())
for chunk in chunks:
    compare_chunk(chunk, engine, folder)
    time.sleep(60.0 if chunk.start else 0.0)
"""


def test_kill_nine(ready, tmp_path):
    """A process that is killed after its second chunk leaves two; the next run adds the third."""
    folder, engine = tmp_path / "killed", ready.engine(ready.graph, "onnxruntime-int8")
    job = tmp_path / "job.pickle"
    job.write_bytes(pickle.dumps((ready.chunks(1024), engine, folder)))
    with subprocess.Popen([sys.executable, "-c", _CHILD, str(job)], cwd=ROOT) as child:
        deadline = time.monotonic() + 60.0
        while len(_written(folder)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        child.send_signal(signal.SIGKILL)
    done = _written(folder)

    resumed = _compared(ready, 1024, folder)

    assert len(done) == 2
    assert done.items() <= _written(folder).items()
    assert resumed.frame().equals(_compared(ready, 4096, tmp_path / "whole").frame())


def test_the_reference_is_run_once(ready, tmp_path):
    """A second candidate reads FP32's outputs; nothing of the reference is written again."""
    before = _written(tmp_path / "outputs") | _written(tmp_path / "noise")

    _compared(ready, 1024, tmp_path / "parts")
    for chunk in ready.chunks(1024):
        observe_chunk(chunk, tmp_path / "noise" / "1024")

    assert _written(tmp_path / "outputs") | _written(tmp_path / "noise") == before


def test_discovered_parts_are_the_same_for_every_candidate(ready, tmp_path):
    """Parts come from the input and FP32, so candidates are cut alike; quarters are quarters."""
    found = _compared(ready, 1024, tmp_path / "parts").with_parts()
    noise = gather(tmp_path / "noise" / "1024", ready.chunks(1024), ready.data, 0).with_parts()

    assert set(found.slices) == {"digit", "camera", "confidence", "input_norm"}
    for name in ("confidence", "input_norm"):
        assert np.array_equal(found.slices[name], noise.slices[name])
    counts = np.unique(found.slices["input_norm"], return_counts=True)[1]
    assert counts.tolist() == [750, 750, 750, 750]


def test_unknown_derived_slice_is_refused(ready):
    """Sequence length of images is refused with what there is instead."""
    chunk = replace(ready.chunks(4096)[0], asked=(OutputSpec(traits=("length",)),))

    with pytest.raises(DataError, match="no input holds sequences"):
        observe_chunk(chunk, ready.root / "lengths")


def test_memory_mapped_data_travels_by_the_chunk(ready, tmp_path):
    """A folder of .npy is read a chunk at a time; a chunk holds its own rows and no more."""
    np.save(tmp_path / "input.image.npy", ready.data.inputs["image"])
    mapped = np.load(tmp_path / "input.image.npy", mmap_mode="r")
    data = DataSet("d", {"image": mapped}, None, ready.data.ids, {})

    chunk = replace(ready, data=data).chunks(1024)[2]

    assert isinstance(chunk.data.inputs["image"], np.memmap)
    assert len(chunk.data) == 952
    assert chunk.name == "0000002048-0000003000"


def test_progress_is_told_with_the_time_left(caplog, monkeypatch):
    """Long runs say how far they are; short ones say nothing."""
    clock = iter(range(0, 100, 3))
    monkeypatch.setattr("validation.chunks.time.monotonic", lambda: float(next(clock)))
    caplog.set_level("INFO", logger="enginegate.validate")

    assert list(followed(["a", "b", "c"], 3, "onnxruntime-int8")) == ["a", "b", "c"]

    assert [record.message for record in caplog.records] == [
        "onnxruntime-int8: 1 of 3 chunks, about 6 s left",
        "onnxruntime-int8: 2 of 3 chunks, about 3 s left",
    ]
