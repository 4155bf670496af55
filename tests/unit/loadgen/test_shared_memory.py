"""What cannot be caused on a machine without a GPU, and what the machine may refuse."""

import itertools
from collections import namedtuple
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from enginegate.candidate import TensorSpec
from enginegate.engines.cuda import SharedGpuMemory
from enginegate.errors import ServerError
from enginegate.loadgen import shared_memory
from enginegate.loadgen.grpc_message import encode_request, parse_request

REQUESTS = tuple(
    encode_request("m", {"x": np.full((1, 5), number, np.uint8), "z": np.float32([[number]])})
    for number in (1, 2)
)


class _Cuda:
    """Memory of a GPU without one: it is an array, and its handle eight bytes."""

    def __init__(self):
        self.said, self.content = [], bytearray()

    @contextmanager
    def __call__(self, size):
        self.said.append(("create", size))
        self.content = bytearray(size)
        try:
            yield SharedGpuMemory(b"\x00\xffhandle", self._write, None)
        finally:
            self.said.append(("destroy",))

    def _write(self, offset, content):
        self.content[offset : offset + len(content)] = content


class _Server:
    def __init__(self, *, refuses=False, busy=0):
        self.refuses, self.busy, self.asked, self.regions = refuses, busy, 0, []

    @contextmanager
    def __call__(self, _address):
        yield self

    def shared_memory(self, _kind="System"):
        return tuple(region.name for region in self.regions)

    def share_memory(self, region):
        if self.refuses:
            raise ServerError("no GPU")
        self.regions.append(region)

    def live(self):
        return True

    def forget_memory(self, region):
        self.asked += 1
        if self.asked <= self.busy:
            raise ServerError("in use")
        self.regions = [each for each in self.regions if each.name != region.name]


@pytest.fixture
def cuda(monkeypatch):
    memory = _Cuda()
    monkeypatch.setattr(shared_memory, "shared_gpu_memory", memory)
    return memory


def test_memory_of_a_gpu(cuda, monkeypatch):
    """Tensors lie in it at the places that requests name; its raw handle goes to the server."""
    server = _Server()
    monkeypatch.setattr(shared_memory, "TritonClient", server)

    with shared_memory.in_shared_memory("127.0.0.1:1", REQUESTS, "cuda") as known:
        region = server.regions[0]
        places = [dict(tensor.parameters) for r in known for tensor in parse_request(r).inputs]

    assert (region.handle, region.kind, region.device) == (b"\x00\xffhandle", "Cuda", 0)
    found = [
        cuda.content[p["shared_memory_offset"].int64_param :][
            : p["shared_memory_byte_size"].int64_param
        ]
        for p in places
    ]
    assert found == [
        content for request in REQUESTS for content in parse_request(request).raw_input_contents
    ]
    assert {p["shared_memory_region"].string_param for p in places} == {region.name}
    assert not parse_request(known[0]).raw_input_contents
    assert cuda.said == [("create", region.size), ("destroy",)]
    assert server.regions == []


@pytest.mark.parametrize(("busy", "left"), [(3, 0), (10**6, 1)])
def test_memory_in_use_is_waited_for(cuda, monkeypatch, caplog, busy, left):
    """The server is asked again until nobody reads it any more, but not for ever."""
    server = _Server(busy=busy)
    monkeypatch.setattr(shared_memory, "TritonClient", server)
    monkeypatch.setattr(shared_memory, "_LAST_ANSWER_S", 0.5)

    with shared_memory.in_shared_memory("127.0.0.1:1", REQUESTS, "cuda"):
        pass

    assert (len(server.regions), len(caplog.messages)) == (left, left)
    assert cuda.said[-1] == ("destroy",)


def test_server_that_refuses_memory(cuda, monkeypatch):
    """What was made for it is given back, and its error comes out."""
    monkeypatch.setattr(shared_memory, "TritonClient", _Server(refuses=True))

    with (
        pytest.raises(ServerError, match="no GPU"),
        shared_memory.in_shared_memory("127.0.0.1:1", REQUESTS, "cuda"),
    ):
        pass

    assert cuda.said[-1] == ("destroy",)


def test_without_a_gpu(monkeypatch):
    """The error says that there is none, and what to do instead."""
    monkeypatch.setattr("enginegate.engines.cuda._driver", lambda: None)
    monkeypatch.setattr(shared_memory, "TritonClient", _Server())

    with (
        pytest.raises(ServerError, match=r"(?s)GPU 0.*no NVIDIA driver.*Share system memory inst"),
        shared_memory.in_shared_memory("127.0.0.1:1", REQUESTS, "cuda"),
    ):
        pass


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        pytest.param((-1, 10), 4 * 10 * 4, id="batched"),
        pytest.param((4, 3, 2), 4 * 3 * 2 * 4, id="fixed"),
        pytest.param((-1,), 4 * 4, id="a-number-a-row"),
        pytest.param((-1, -1), 0, id="only-the-answer-says"),
    ],
)
def test_bytes_of_an_output(shape, size):
    """Of four rows of float32; what is not known beforehand travels."""
    spec = TensorSpec(name="y", dtype="float32", shape=shape)

    assert shared_memory._output_bytes(spec, 4) == size


def test_outputs_have_places_of_their_own(cuda, monkeypatch):
    """Every request writes elsewhere; an output of unknown size is asked for, and travels."""
    server = _Server()
    specs = (
        TensorSpec(name="y", dtype="float32", shape=(-1, 10)),
        TensorSpec(name="z", dtype="uint8", shape=(-1, -1)),
    )
    server.config = lambda _model, _version: SimpleNamespace(outputs=specs)
    monkeypatch.setattr(shared_memory, "TritonClient", server)

    with shared_memory.in_shared_memory("127.0.0.1:1", REQUESTS, "cuda", outputs=True) as known:
        outputs = [list(parse_request(request).outputs) for request in known]
        size = server.regions[0].size

    taken = [
        (p["shared_memory_offset"].int64_param, p["shared_memory_byte_size"].int64_param)
        for request in known
        for tensor in (*parse_request(request).inputs, *parse_request(request).outputs[:1])
        for p in [dict(tensor.parameters)]
    ]
    taken.sort()
    assert [[tensor.name for tensor in each] for each in outputs] == [["y", "z"]] * 2
    assert not any(each[1].parameters for each in outputs)
    assert all(at + count <= after for (at, count), (after, _) in itertools.pairwise(taken))
    assert taken[-1][0] + taken[-1][1] <= size
    assert outputs[0][0].parameters["shared_memory_byte_size"].int64_param == 40
    assert len(cuda.content) == size


def test_more_than_the_machine_has(monkeypatch):
    """Writing past the memory there is would kill the process, so that is refused before."""
    monkeypatch.setattr(shared_memory, "TritonClient", _Server())
    usage = namedtuple("usage", "free")  # noqa: PYI024
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage(16))

    with (
        pytest.raises(ServerError, match=r"16 free.*--shm-size"),
        shared_memory.in_shared_memory("127.0.0.1:1", REQUESTS, "system"),
    ):
        pass


def test_region_that_cannot_be_written_is_taken_away():
    """Nothing of it stays in the system's memory."""
    name = "enginegate-load-test-unwritten"

    with (
        pytest.raises(ValueError, match="different"),
        shared_memory._system_memory(name, 4, [(0, b"four"), (2, b"more")]),
    ):
        pass

    assert not Path("/dev/shm", name).exists()  # noqa: S108
