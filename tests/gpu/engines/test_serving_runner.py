"""The runner's pipeline on a real GPU: the driver's streams, and ONNX Runtime's captured graphs."""

import shutil
import threading

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginegate.engines import cuda
from enginegate.engines.onnxruntime import gpu as gpu_file
from enginegate.engines.onnxruntime.serve import open_for_triton
from enginegate.engines.python_backend.device import GpuDevice
from enginegate.engines.python_backend.memory import Memory
from enginegate.engines.python_backend.pipeline import Pipeline
from enginegate.engines.python_backend.serial import Serial

pytestmark = pytest.mark.gpu
onnxruntime = pytest.importorskip("onnxruntime")
if "CUDAExecutionProvider" not in onnxruntime.get_available_providers() or cuda.gpu() is None:
    pytest.skip("there is no GPU, or onnxruntime-gpu is not installed", allow_module_level=True)

CHANNELS, SIZE, LIMIT = 3, 12, 16


@pytest.fixture(scope="module")
def network():
    """A convolution, which keeps one plan a session, and a mean."""
    weights = np.random.default_rng(0).normal(size=(8, CHANNELS, 3, 3)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["c"]),
            helper.make_node("Relu", ["c"], ["r"]),
            helper.make_node("GlobalAveragePool", ["r"], ["p"]),
            helper.make_node("Flatten", ["p"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", CHANNELS, "h", "w"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8])],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    return model.SerializeToString()


@pytest.fixture
def open_pipeline(network, tmp_path):
    """Opens the network as Triton's process would."""
    shutil.copyfile(gpu_file.__file__, tmp_path / "onnxruntime_gpu.py")
    opened = []

    def run(lanes, graphs="on"):
        flags = {"provider": "CUDAExecutionProvider", "cuda_graphs": graphs, "use_tf32": "0"}
        manifest = {"filename": "model.onnx", "max_batch_size": LIMIT, "flags": flags}
        engine = open_for_triton(tmp_path, network, manifest, {}, 0)
        example = {"x": np.ones((1, CHANNELS, SIZE, SIZE), np.float32)}
        device = GpuDevice(0)
        opened.append(
            Pipeline(engine, device, example, lanes=lanes)
            if lanes
            else Serial(engine, device, example)
        )
        return opened[-1]

    yield run
    for each in opened:
        each.close()


def images(count, seed, size=SIZE):
    return np.random.default_rng(seed).random((count, CHANNELS, size, size), dtype=np.float32)


def answers_of(pipeline, batches):
    """Outputs of batches that were submitted one after the other without waiting."""
    found, done = {}, threading.Semaphore(0)
    for number, parts in enumerate(batches):

        def answer(outcome, numbers, number=number):
            if numbers.start == 0:
                found[number] = outcome
                done.release()

        pipeline.submit([{"x": part} for part in parts], answer)
    for _ in batches:
        assert done.acquire(timeout=60)
    return [found[number] for number in range(len(batches))]


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("graphs", ["on", "off"])
def test_overlapping_batches_get_their_own_answers(open_pipeline, network, lanes, graphs):
    """Two hundred batches of changing sizes agree with ONNX Runtime on the processor."""
    sizes = np.random.default_rng(1).integers(1, LIMIT + 1, 200)
    batches = [[images(int(size), seed)] for seed, size in enumerate(sizes)]

    found = answers_of(open_pipeline(lanes, graphs), batches)

    reference = onnxruntime.InferenceSession(network, providers=["CPUExecutionProvider"])
    for (batch,), outcome in zip(batches, found, strict=True):
        assert not isinstance(outcome, Exception), outcome
        (expected,) = reference.run(["y"], {"x": batch})
        np.testing.assert_allclose(outcome["y"], expected, atol=2e-4)


def test_batches_one_after_the_other_agree_with_the_processor(open_pipeline, network):
    """As in one of several processes: no threads, and each run takes the memory of the last."""
    serial = open_pipeline(0)
    reference = onnxruntime.InferenceSession(network, providers=["CPUExecutionProvider"])

    for seed, size in enumerate((1, LIMIT, 5, LIMIT, 2)):
        batch = images(size, seed)
        found = serial.run([{"x": batch[:1]}, {"x": batch[1:]}] if size > 1 else [{"x": batch}])

        (expected,) = reference.run(["y"], {"x": batch})
        np.testing.assert_allclose(found["y"], expected, atol=2e-4)


def test_inputs_in_device_memory_agree_with_those_of_the_host(open_pipeline):
    """A tensor on the device is copied there, beside rows that come from the host."""
    pipeline, device = open_pipeline(1), GpuDevice(0)
    x, stream = images(4, 5), device.stream()
    address = device.allocate(x.nbytes)
    stream.upload(address, x)
    stream.wait()
    there = Memory(address, x.shape, "float32")

    on_host, on_device, mixed = answers_of(pipeline, [[x], [there], [x, there]])

    np.testing.assert_array_equal(on_device["y"], on_host["y"])
    np.testing.assert_allclose(mixed["y"], np.concatenate([on_host["y"]] * 2), atol=1e-5)


def test_sizes_that_are_not_warm_are_answered(open_pipeline, network):
    """Another image size than the tuned one runs uncaptured, between batches that are captured."""
    batches = [[images(2, 1)], [images(3, 2, size=20)], [images(2, 3)], [images(3, 4, size=20)]]

    found = answers_of(open_pipeline(1), batches)

    reference = onnxruntime.InferenceSession(network, providers=["CPUExecutionProvider"])
    for (batch,), outcome in zip(batches, found, strict=True):
        assert not isinstance(outcome, Exception), outcome
        (expected,) = reference.run(["y"], {"x": batch})
        np.testing.assert_allclose(outcome["y"], expected, atol=2e-4)
