"""ONNX Runtime engines are built once, proven, checked and run."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from enginegate.engines import (
    availability,
    build_engine,
    open_engine,
    open_onnx,
    open_reference,
    runnable_here,
    serving,
)
from enginegate.engines.onnxruntime import session as sessions
from enginegate.errors import (
    BuildError,
    DataError,
    ModelError,
    TamperedError,
    TookTooLongError,
    ToolError,
)

pytestmark = pytest.mark.xdist_group("engines")


@pytest.fixture(scope="session")
def int8(plan, store):
    return build_engine(plan("onnxruntime-int8"), store / "engines")


@pytest.fixture
def reference(cnn, samples):
    with open_reference(cnn.value, cnn.folder) as runner:
        return runner.run({"image": samples.inputs["image"]})["output"]


def test_fp32_is_the_reference_model(plan, store, cnn, samples, reference):
    """The FP32 engine holds the very ONNX, and its optimised answers are the reference's."""
    built = build_engine(plan("onnxruntime-fp32"), store / "engines")

    with open_engine(built.value, built.folder) as runner:
        answer = runner.run({"image": samples.inputs["image"]})["output"]

    assert built.value.file == cnn.value.file
    assert built.value.converter == "none"
    np.testing.assert_allclose(answer, reference, atol=1e-5)


def test_int8_is_proven_and_agrees(int8, samples, reference):
    """INT8 is counted in the graph, runs on the provider asked for, and stays near FP32."""
    engine = int8.value

    with open_engine(engine, int8.folder) as runner:
        answer = runner.run({"image": samples.inputs["image"]})["output"]

    assert runner.device == engine.proof.device == "CPUExecutionProvider"
    assert engine.proof.proven
    assert engine.proof.weighted_layers == {"int8": 3}
    assert engine.calibration_sha256
    assert runnable_here(engine) is None
    assert 0 < np.abs(answer - reference).max() < 0.05 * np.abs(reference).max()


def test_second_build_reads_the_store(plan, store, int8):
    """The same plan is not built twice."""
    again = build_engine(plan("onnxruntime-int8"), store / "engines")

    assert again.reused
    assert again.value == int8.value


def test_damaged_engine_is_built_again(plan, tmp_path):
    """An engine whose bytes changed in the store is never used; the answer says why."""
    first = build_engine(plan("onnxruntime-fp32"), tmp_path)
    with (first.folder / "model.onnx").open("r+b") as file:
        file.seek(100)
        file.write(b"\xff")

    with (
        pytest.raises(TamperedError, match="is not the file that was recorded"),
        open_engine(first.value, first.folder),
    ):
        pass
    again = build_engine(plan("onnxruntime-fp32"), tmp_path)

    assert not again.reused
    assert "was damaged" in again.note
    assert again.value.file == first.value.file


def test_two_flows_build_once(plan, tmp_path):
    """Of two that want an engine at the same time, one builds and the other reads."""
    wanted = plan("onnxruntime-int8")

    with ThreadPoolExecutor(2) as pool:
        built = list(pool.map(lambda _: build_engine(wanted, tmp_path), range(2)))

    assert sorted(each.reused for each in built) == [False, True]
    assert built[0].value == built[1].value


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"max_batch_size": 9}, id="batch"),
        pytest.param({"converter": "another tool"}, id="converter"),
        pytest.param({"toolchain": "another library"}, id="library"),
        pytest.param({"calibration_sha256": "0" * 64}, id="calibration"),
    ],
)
def test_plan_key_covers_everything_that_decides_bytes(plan, change):
    """Two plans that may differ in bytes never share a folder."""
    first = plan("onnxruntime-int8")

    assert replace(first, **change).key != first.key
    assert plan("onnxruntime-int8").key == first.key


def test_limits_are_not_in_the_key(plan):
    """A longer time limit builds nothing again."""
    patient = plan("tensorrt-fp16", tensorrt={"timeout_s": 1234.0, "memory_mib": 999})

    assert patient.key == plan("tensorrt-fp16").key


@pytest.mark.parametrize("name", ["onnxruntime-fp16", "onnxruntime-bf16", "onnxruntime-tf32"])
def test_precision_without_kernels_is_refused(plan, tmp_path, name):
    """The CPU provider's missing precisions say which provider has them; nothing is left."""
    with pytest.raises(BuildError, match="needs the CUDA provider"):
        build_engine(plan(name), tmp_path)

    assert [path for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


def test_missing_calibration_data_leaves_nothing(plan, tmp_path):
    """INT8 without data is a clear error and an empty store."""
    with pytest.raises(DataError, match="needs calibration data"):
        build_engine(plan("onnxruntime-int8", data=None), tmp_path)

    assert [path for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


def test_planned_elsewhere_is_refused(plan, tmp_path):
    """A plan made with other libraries is not built under its key."""
    with pytest.raises(BuildError, match=r"planned with onnxruntime 0\.1, but onnxruntime"):
        build_engine(replace(plan("onnxruntime-fp32"), toolchain="onnxruntime 0.1"), tmp_path)


def test_changed_onnx_is_refused(plan, tmp_path):
    """The FP32 model is checked where it is opened."""
    (tmp_path / "model.onnx").write_bytes(b"other")

    with pytest.raises(TamperedError):
        build_engine(replace(plan("onnxruntime-fp32"), folder=tmp_path), tmp_path / "engines")


@pytest.mark.parametrize(
    ("image", "message"),
    [
        pytest.param(np.zeros((2, 1, 8, 9), np.float32), "the model takes image", id="shape"),
        pytest.param(np.zeros((2, 1, 8, 8), np.float64), "is float64", id="dtype"),
        pytest.param(np.zeros((0, 1, 8, 8), np.float32), "at least one", id="empty"),
    ],
)
def test_wrong_inputs_are_data_errors(int8, image, message):
    """What does not fit is refused before ONNX Runtime sees it."""
    with (
        open_engine(int8.value, int8.folder) as runner,
        pytest.raises(DataError, match=message),
    ):
        runner.run({"image": image})


def test_unloadable_onnx_is_named(tmp_path):
    """A file that ONNX Runtime refuses is an error with its path."""
    (tmp_path / "model.onnx").write_bytes(b"nonsense")

    with (
        pytest.raises(ModelError, match=r"cannot load .*model\.onnx"),
        open_onnx(tmp_path / "model.onnx"),
    ):
        pass


def test_session_uses_one_thread(int8, samples):
    """Throughput comes from instances, so a session starts no workers of its own."""
    before = set(Path("/proc/self/task").iterdir())

    with open_engine(int8.value, int8.folder) as runner:
        runner.run({"image": samples.inputs["image"]})
        during = set(Path("/proc/self/task").iterdir())

    assert not during - before


def test_native_backend_gets_the_engine_alone(int8):
    """Triton's own backend needs no code of ours; one that cannot serve the kind is refused."""
    served = serving(int8.value, int8.folder, backend="onnxruntime")

    assert (served.backend, served.gpu) == ("onnxruntime", False)
    assert dict(served.files) == {"model.onnx": int8.folder / int8.value.filename}
    with pytest.raises(ModelError, match="only in onnxruntime or python"):
        serving(int8.value, int8.folder, backend="tensorrt")


def test_serving_names_files_of_the_store(int8):
    """Triton gets the model file, the engine and its manifest, all regular files."""
    served = serving(int8.value, int8.folder)

    assert served.backend == "python"
    assert set(served.files) == {
        "model.py",
        "engine_onnxruntime.py",
        "engine.json",
        "model.onnx",
    }
    assert all(path.is_file() and not path.is_symlink() for path in served.files.values())
    assert served.settings.parameters["intra_op_threads"] == int8.value.flags["intra_op_threads"]


def test_doctor_sees_the_library():
    """What is installed here can build and run."""
    found = {each.kind: each for each in availability()}["onnxruntime"]

    assert found.can_build
    assert found.can_run
    assert found.library.startswith("onnxruntime 1.")


def test_missing_library_says_how_to_install(plan, monkeypatch, tmp_path):
    """Without ONNX Runtime, planning works, building says what to run, and doctor too."""
    import sys

    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    planned = plan("onnxruntime-fp32")

    with pytest.raises(BuildError, match=r"not installed here.*enginegate\[cpu\]"):
        build_engine(planned, tmp_path)
    assert planned.toolchain == "absent"
    found = {each.kind: each for each in availability()}["onnxruntime"]
    assert (found.can_build, found.remedy) == (False, "pip install 'enginegate[cpu]'")


def test_slow_session_open_is_errored_not_failed(plan, tmp_path, monkeypatch):
    """On a busy machine nothing was found out: a broken tool is errored, never failed."""

    def too_slow(*_, **__):
        raise TookTooLongError("ONNX Runtime did not open model.onnx within 900 s.")

    monkeypatch.setattr(sessions, "open_session", too_slow)

    with pytest.raises(ToolError, match="did not open"):
        build_engine(plan("onnxruntime-fp32"), tmp_path / "engines")
    assert not list((tmp_path / "engines").glob("[!.]*"))
