"""Plans in our runner, with a library that stands in for TensorRT and threads for a GPU."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from enginegate.engines.python_backend.memory import Memory
from enginegate.engines.python_backend.pipeline import Pipeline
from enginegate.engines.tensorrt.kind import KIND
from enginegate.engines.tensorrt.serve import _context_maker, _Plan
from enginegate.engines.tensorrt.worker.contexts import ContextMaker
from tests.fakes.host_device import GpuDevice, host_array

MANIFEST = {"builder": "tensorrt 8.6.0", "max_batch_size": 6}
SHARED = MANIFEST | {"flags": {"shares_profile": "true"}}


class Library:
    """Doubles ``x``; before version 10 a plan's profile is one context's, or asked for.

    A graph that is launched doubles what its context has been told by then.
    """

    def __init__(self, version, *, refuses=False):
        self.__version__ = version
        self.is_new, self.refuses = version.startswith("1"), refuses
        self.deserialised, self.streams, self.contexts = 0, {}, []
        if self.is_new:
            self.ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED=2)

    class Logger:
        WARNING = 0

        def __init__(self, *_arguments):
            pass

    def Runtime(self, _logger):  # noqa: N802 - TensorRT's name
        return self

    def deserialize_cuda_engine(self, content):
        self.deserialised += 1
        if content == b"broken":
            return None
        return NewPlan(self) if self.is_new else OldPlan(self)


class Plan:
    num_io_tensors = 2

    def __init__(self, library):
        self.library, self.contexts = library, 0

    def made(self, context):
        self.contexts += 1
        self.library.contexts.append(context)
        return context

    def get_tensor_name(self, at):
        return "xy"[at]

    def get_tensor_dtype(self, _name):
        class Type:
            name = "FLOAT"

        return Type


class OldPlan(Plan):
    device_memory_size = 128

    def create_execution_context_without_device_memory(self):
        return self.made(OldContext(self.library, -1 if self.contexts else 0))


class NewPlan(Plan):
    device_memory_size_v2 = 128

    def create_execution_context(self, strategy):
        assert strategy == 2
        return self.made(NewContext(self.library, 0))


class Context:
    def __init__(self, library, profile):
        self.library, self.shape, self.places = library, (), {}
        self.active_optimization_profile, self.memory = profile, 0

    def set_input_shape(self, _name, shape):
        self.shape = tuple(shape)
        return self.shape[1] == 2

    def infer_shapes(self):
        return []

    def get_tensor_shape(self, _name):
        return self.shape

    def set_tensor_address(self, name, address):
        self.places[name] = address
        return True

    def execute_async_v3(self, stream):
        assert self.active_optimization_profile == 0
        assert self.memory

        def double():
            x, y = (Memory(self.places[name], self.shape, "float32") for name in "xy")
            host_array(y)[...] = host_array(x) * 2

        self.library.streams[stream].queue(double)
        return True


class OldContext(Context):
    def set_optimization_profile_async(self, index, _stream):
        if self.library.refuses:
            raise RuntimeError("Error in set optimization profile async.")
        self.active_optimization_profile = index
        return True

    @property
    def device_memory(self):
        raise AttributeError("unreadable attribute")

    @device_memory.setter
    def device_memory(self, address):
        self.memory = address


class NewContext(Context):
    def set_device_memory(self, memory, size):
        assert size == 128
        self.memory = memory


@pytest.mark.parametrize(
    ("library", "manifest", "loads", "contexts"),
    [
        pytest.param(Library("8.6.0"), MANIFEST, 2, 1, id="a-profile-for-one-context"),
        pytest.param(Library("8.6.0"), SHARED, 1, 5, id="a-shared-profile"),
        pytest.param(Library("8.6.0", refuses=True), SHARED, 2, 1, id="a-refusing-library"),
        pytest.param(Library("10.13.0"), MANIFEST, 1, 5, id="always-shared-from-10-on"),
    ],
)
def test_lanes_share_a_plan_where_the_library_lets_them(library, manifest, loads, contexts):
    """Two lanes answer from one copy of the weights; four graphs of a lane share its memory."""
    answers = []
    plan = _Plan(library, b"plan", manifest, ContextMaker)
    device = GpuDevice()
    made = device.stream

    def noted():
        stream = made()
        library.streams[stream.address] = stream
        return stream

    device.stream = noted
    pipeline = Pipeline(plan, device, {"x": np.ones((1, 2), np.float32)}, lanes=2)

    for rows in (1, 3, 6):
        x = np.full((rows, 2), rows, np.float32)
        pipeline.submit([{"x": x}], lambda found, _numbers: answers.append(found["y"]))
    pipeline.close()

    assert (plan.buckets, library.deserialised) == ((1, 2, 4, 6), loads)
    usable = [each for each in library.contexts if each.memory]
    assert [each.memory for each in usable].count(usable[0].memory) == contexts
    assert len(usable) == 2 * contexts
    assert sorted(len(found) for found in answers) == [1, 3, 6]
    assert all((found == 2 * len(found)).all() for found in answers)


def test_refused_plan_names_what_built_it():
    """A plan that the library refuses is an error that says which version it needs."""
    with pytest.raises(RuntimeError, match=r"8\.5\.0 refuses to load a plan of tensorrt 8\.6\.0"):
        _Plan(Library("8.5.0"), b"broken", MANIFEST, ContextMaker)


def test_contexts_are_made_by_the_file_beside(tmp_path):
    """The one that the plan's own files brought; without it the release is incomplete."""
    engine = SimpleNamespace(filename="engine.plan")
    files = KIND.runner_files(engine, tmp_path / engine.filename).files
    shutil.copy(files["tensorrt_contexts.py"], tmp_path / "tensorrt_contexts.py")

    assert _context_maker(tmp_path).__name__ == "ContextMaker"
    with pytest.raises(RuntimeError, match=r"tensorrt_contexts\.py is missing"):
        _context_maker(tmp_path / "elsewhere")
