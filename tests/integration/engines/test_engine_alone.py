"""A real engine's speed without a server, kept by content and bound to its bytes."""

from dataclasses import replace
from pathlib import Path

import pytest

from enginegate.benchmark.engine_alone import EngineMeter, fastest_first
from enginegate.candidate import PROGRAM_FILE, FileDigest, Precision
from enginegate.engines import build_engine, cuda
from enginegate.engines.torch_inductor.eager import eager_precisions
from enginegate.errors import EnginegateError, TamperedError
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


def test_pytorch_itself_is_measured_by_the_same_sweep(meter, cnn):
    """In a process of its own, on real samples; kept for this machine."""
    (found,) = meter.measure_eager(cnn.value, cnn.folder, 8, (Precision.FP32, Precision.FP16))
    again = meter.measure_eager(cnn.value, cnn.folder, 8, (Precision.FP32, Precision.FP16))

    assert (found.precision, found.device, found.inputs_on) == (Precision.FP32, "CPU", "host")
    assert found.library.startswith("torch 2.")
    assert found.batches[0].batch_size == 1
    assert all(len(batch.windows_per_s) >= 3 for batch in found.batches)
    assert again == (found,)


def test_source_that_is_no_pytorch_model_has_no_baseline(meter, cnn):
    """There is nothing to run eagerly."""
    plain = cnn.value.model_copy(update={"program": None})

    assert meter.measure_eager(plain, cnn.folder, 8, (Precision.FP32,)) == ()


def test_changed_program_is_not_measured(meter, cnn, tmp_path):
    """Its bytes are those that the ONNX model came from."""
    (tmp_path / PROGRAM_FILE).write_bytes((cnn.folder / PROGRAM_FILE).read_bytes() + b"\0")

    with pytest.raises(TamperedError):
        meter.measure_eager(cnn.value, tmp_path, 8, (Precision.FP32,))


def test_broken_program_is_an_error_with_its_reason(meter, cnn, tmp_path):
    """The process says what PyTorch said."""
    (tmp_path / PROGRAM_FILE).write_bytes(b"no program")
    program = cnn.value.program.model_copy(update={"file": FileDigest.of(tmp_path / PROGRAM_FILE)})

    with pytest.raises(EnginegateError, match="PyTorch's own model"):
        meter.measure_eager(
            cnn.value.model_copy(update={"program": program}), tmp_path, 8, (Precision.FP32,)
        )


@pytest.mark.skipif(cuda.gpu() is not None, reason="this machine has a GPU")
def test_precisions_of_eager_are_those_of_the_device():
    """16-bit arithmetic is emulated on a processor; a GPU without Ampere's has no TF32."""
    wanted = (Precision.FP16, Precision.TF32, Precision.INT8)

    assert eager_precisions("cpu", wanted) == (Precision.FP32,)
    assert eager_precisions("cuda", wanted) == (Precision.FP32, Precision.FP16)
