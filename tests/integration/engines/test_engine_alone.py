"""A real engine's speed without a server, kept by content and bound to its bytes."""

from dataclasses import replace
from pathlib import Path

import pytest

from enginegate.benchmark.engine_alone import EngineMeter, fastest_first
from enginegate.engines import build_engine
from enginegate.errors import EnginegateError
from enginegate.evidence import EngineSpeed

pytestmark = pytest.mark.xdist_group("engines")


@pytest.fixture(scope="module")
def built(plan, store):
    """The CNN in FP32, for the processor."""
    return build_engine(plan("onnxruntime-fp32"), store / "engines")


@pytest.fixture
def meter(samples, tmp_path):
    """A second for one engine; serving would form batches of two."""
    return EngineMeter(samples, samples.sha256, (2,), 1.0, "this machine", tmp_path)


def test_engine_is_measured_alone_on_real_samples(meter, built):
    """Ascending batch sizes with several windows each; a processor reads host memory."""
    found = meter.measure(built.value, built.folder)

    sizes = [batch.batch_size for batch in found.batches]
    assert sizes[:2] == [1, 2]
    assert sizes == sorted(set(sizes))
    assert all(len(batch.windows_per_s) >= 3 for batch in found.batches)
    assert all(batch.samples_per_s > 0 for batch in found.batches)
    assert (found.device, found.inputs_on, found.graphs) == ("CPUExecutionProvider", "host", None)
    assert found.engine_sha256 == built.value.file.sha256
    assert found.opened_mib is found.largest_batch_mib is None


def test_speed_is_measured_once_on_one_machine(meter, built):
    """Another machine's numbers are not this one's."""
    first = meter.measure(built.value, built.folder)
    again = meter.measure(built.value, built.folder)
    replace(meter, machine="another machine").measure(built.value, built.folder)

    assert again == first
    assert len(list(Path(meter.folder).iterdir())) == 2


def test_changed_engine_is_not_measured(meter, built, tmp_path):
    """The bytes that are timed are those that were judged."""
    for file in built.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / built.value.filename
    path.write_bytes(path.read_bytes() + b"\0")

    with pytest.raises(EnginegateError, match=built.value.filename):
        meter.measure(built.value, tmp_path)


def test_small_samples_fill_large_batches(meter):
    """They come again from the start."""
    few = replace(meter, samples=meter.samples.head(3))

    batch = few.rows(7)["image"]

    assert (batch == meter.samples.inputs["image"][[0, 1, 2, 0, 1, 2, 0]]).all()


def test_fastest_engine_is_served_first(meter, built):
    """One whose speed is not known is served last; equals keep the policy's order."""
    found = meter.measure(built.value, built.folder)
    first, *_ = found.batches
    slower = EngineSpeed.model_validate(
        found.model_dump()
        | {"batches": [{"batch_size": 1, "windows_per_s": [first.samples_per_s / 9], "runs": 1}]}
    )

    assert fastest_first([None, slower, found, slower]) == (2, 1, 3, 0)
