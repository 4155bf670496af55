"""Plans in our runner, with a library that stands in for TensorRT and threads for a GPU."""

import numpy as np
import pytest

from enginegate.engines.python_backend.pipeline import Memory, Pipeline
from enginegate.engines.tensorrt.serve import _Plan
from tests.fakes.host_device import GpuDevice, host_array

MANIFEST = {"builder": "tensorrt 8.6.0", "max_batch_size": 6}


class Library:
    """Doubles ``x``; before version 10, one context a plan, as without profile sharing."""

    def __init__(self, version):
        self.__version__ = version
        self.deserialised = 0
        self.streams = {}

    class Logger:
        WARNING = 0

        def __init__(self, *_arguments):
            pass

    def Runtime(self, _logger):  # noqa: N802 - TensorRT's name
        return self

    def deserialize_cuda_engine(self, content):
        self.deserialised += 1
        return None if content == b"broken" else Plan(self)


class Plan:
    num_io_tensors = 2

    def __init__(self, library):
        self.library, self.contexts = library, 0

    def create_execution_context(self):
        self.contexts += 1
        return Context(self.library)

    def get_tensor_name(self, at):
        return "xy"[at]

    def get_tensor_dtype(self, _name):
        class Type:
            name = "FLOAT"

        return Type


class Context:
    def __init__(self, library):
        self.library, self.shape, self.places = library, (), {}

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
        x, y = (Memory(self.places[name], self.shape, "float32") for name in "xy")

        def double():
            host_array(y)[...] = host_array(x) * 2

        self.library.streams[stream].queue(double)
        return True


@pytest.mark.parametrize(("version", "loads"), [("8.6.0", 2), ("10.3.0", 1)])
def test_lanes_share_a_plan_where_the_library_lets_them(version, loads):
    """Two lanes answer from one copy of the weights, or from one each before version 10."""
    library, answers = Library(version), []
    plan = _Plan(library, b"plan", MANIFEST)
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
    assert sorted(len(found) for found in answers) == [1, 3, 6]
    assert all((found == 2 * len(found)).all() for found in answers)


def test_refused_plan_names_what_built_it():
    """A plan that the library refuses is an error that says which version it needs."""
    with pytest.raises(RuntimeError, match=r"8\.5\.0 refuses to load a plan of tensorrt 8\.6\.0"):
        _Plan(Library("8.5.0"), b"broken", MANIFEST)
