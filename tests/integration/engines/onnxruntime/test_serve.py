"""The model file that Triton's Python backend runs, with a stand-in for Triton's own module.

Real Triton loads the same file in the tests of the Triton room; here are faults that a client
cannot make it meet: a batch that fails, tensors that do not match the configuration.
"""

import importlib.util
import json
import shutil
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from enginegate.engines import build_engine, open_engine, serving

pytestmark = pytest.mark.xdist_group("engines")


class Capsule:
    """Lets NumPy take an array out of a bare DLPack capsule, as Triton does."""

    def __init__(self, capsule):
        self._capsule = capsule

    def __dlpack__(self, **_options):
        return self._capsule

    def __dlpack_device__(self):
        return (1, 0)


class Tensor:
    def __init__(self, name, array):
        self._name, self.array = name, array

    def name(self):
        return self._name

    def is_cpu(self):
        return True

    def to_dlpack(self):
        return self.array.__dlpack__()

    @classmethod
    def from_dlpack(cls, name, capsule):
        return cls(name, np.from_dlpack(Capsule(capsule)))


class Request:
    def __init__(self, **arrays):
        self._tensors = [Tensor(name, array) for name, array in arrays.items()]

    def inputs(self):
        return self._tensors


class Response:
    def __init__(self, output_tensors, error=None):
        self.outputs = {tensor.name(): tensor.array for tensor in output_tensors}
        self.error = error


@pytest.fixture(autouse=True)
def triton(monkeypatch):
    """Triton's module, as far as the model file uses it."""
    module = ModuleType("triton_python_backend_utils")
    module.Tensor = Tensor
    module.InferenceResponse = Response
    module.TritonError = str
    module.TritonModelException = RuntimeError
    module.triton_string_to_numpy = {"TYPE_FP32": np.float32}.__getitem__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.fixture
def built(plan, store):
    return build_engine(plan("onnxruntime-int8"), store / "engines")


@pytest.fixture
def version(tmp_path, built):
    """A version folder, filled as the repository fills it."""
    folder = tmp_path / "cnn" / "3"
    folder.mkdir(parents=True)
    for name, source in serving(built.value, built.folder).files.items():
        shutil.copyfile(source, folder / name)
    return folder


@pytest.fixture
def load(version):
    """Loads the model file as Triton's stub does."""

    def run(parameters=None):
        spec = importlib.util.spec_from_file_location("served_model", version / "model.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        model = module.TritonPythonModel()
        config = {
            "input": [{"name": "image", "data_type": "TYPE_FP32", "dims": ["1", "8", "8"]}],
            "output": [{"name": "output", "data_type": "TYPE_FP32", "dims": ["10"]}],
            "parameters": {k: {"string_value": v} for k, v in (parameters or {}).items()},
        }
        model.initialize(
            {
                "model_config": json.dumps(config),
                "model_repository": str(version.parent),
                "model_version": version.name,
            }
        )
        return model

    return run


def test_answers_are_the_validated_ones(load, built, samples):
    """Requests of different sizes in one batch each get the rows that the engine computes."""
    images = samples.inputs["image"]
    model = load()

    answers = model.execute(
        [Request(image=images[:1]), Request(image=images[1:4]), Request(image=images[4:6])]
    )

    with open_engine(built.value, built.folder) as runner:
        expected = runner.run({"image": images[:6]})["output"]
    assert [answer.error for answer in answers] == [None] * 3
    assert [len(answer.outputs["output"]) for answer in answers] == [1, 3, 2]
    np.testing.assert_allclose(
        np.concatenate([answer.outputs["output"] for answer in answers]), expected, atol=1e-6
    )


def test_batch_runs_the_session_once(load, samples):
    """The session runs once for all requests of a batch."""
    model = load()
    session, calls = model._engine._session, []

    class Counting:
        def run(self, *arguments):
            calls.append(arguments)
            return session.run(*arguments)

    model._engine._session = Counting()

    model.execute([Request(image=samples.inputs["image"][:2]) for _ in range(5)])

    assert len(calls) == 1


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        pytest.param({}, "input image is missing", id="missing"),
        pytest.param({"image": np.zeros((2, 1, 9, 8), np.float32)}, "must be float32", id="shape"),
        pytest.param({"image": np.zeros((2, 1, 8, 8), np.float16)}, "is float16", id="dtype"),
        pytest.param({"image": np.zeros((0, 1, 8, 8), np.float32)}, "rows", id="no-rows"),
    ],
)
def test_invalid_request_does_not_fail_its_batch(load, samples, arrays, message):
    """A request that does not fit gets an error of its own; its neighbours get answers."""
    good = samples.inputs["image"][:2]

    answers = load().execute([Request(image=good), Request(**arrays), Request(image=good)])

    assert [bool(answer.error) for answer in answers] == [False, True, False]
    assert message in answers[1].error
    np.testing.assert_array_equal(answers[0].outputs["output"], answers[2].outputs["output"])


def test_failing_batch_answers_every_request(load, samples):
    """When the run itself fails, each request still gets an answer: an error with the reason."""
    model = load()

    class Broken:
        def run(self, *_arguments):
            raise MemoryError("no room")

    model._engine._session = Broken()
    image = samples.inputs["image"][:1]

    answers = model.execute([Request(image=image), Request(), Request(image=image)])

    assert [answer.error for answer in answers] == [
        "enginegate: MemoryError: no room",
        "enginegate: input image is missing",
        "enginegate: MemoryError: no room",
    ]


def test_changed_engine_is_not_loaded(load, version):
    """The engine's bytes must be those of its manifest, or the load fails."""
    engine = version / "model.onnx"
    engine.write_bytes(engine.read_bytes() + b"\x00")

    with pytest.raises(RuntimeError, match="is not the engine that was recorded: sha256"):
        load()


def test_fallback_to_another_provider_fails_the_load(version):
    """A session that does not get the provider it asked for is refused, never used quietly."""
    from enginegate.engines.onnxruntime import gpu
    from enginegate.engines.onnxruntime.serve import open_for_triton

    shutil.copyfile(gpu.__file__, version / "onnxruntime_gpu.py")
    manifest = json.loads((version / "engine.json").read_bytes())
    asked = {"provider": "CUDAExecutionProvider"}
    content = (version / "model.onnx").read_bytes()
    lane = open_for_triton(version, content, manifest, asked, 0).lane(SimpleNamespace(address=0))

    with (
        pytest.warns(UserWarning, match="CUDAExecutionProvider"),
        pytest.raises(RuntimeError, match="asked for CUDAExecutionProvider"),
    ):
        lane.bind({}, None, warm=True)


def test_threads_can_be_set(load, samples):
    """More threads than one are a parameter away, and change nothing in the answers."""
    image = samples.inputs["image"][:4]

    one = load().execute([Request(image=image)])[0]
    two = load({"intra_op_threads": "2"}).execute([Request(image=image)])[0]

    np.testing.assert_allclose(one.outputs["output"], two.outputs["output"], atol=1e-6)
