"""What cannot be caused on a machine without a GPU, and what the machine may refuse."""

import base64
from collections import namedtuple
from contextlib import contextmanager

import numpy as np
import pytest

from enginegate.errors import ServerError
from enginegate.loadgen import shared_memory
from enginegate.loadgen.grpc_message import encode_request, parse_request

REQUESTS = tuple(
    encode_request("m", {"x": np.full((1, 5), number, np.uint8), "z": np.float32([[number]])})
    for number in (1, 2)
)


class _Cuda:
    """The vendor's library without a GPU: memory is an array, the handle eight bytes."""

    def __init__(self):
        self.said, self.content = [], None

    def create_shared_memory_region(self, name, size, device):
        self.said.append(("create", size, device))
        return name

    def set_shared_memory_region(self, _handle, values):
        self.content = values[0].tobytes()

    def get_raw_handle(self, _handle):
        return base64.b64encode(b"\x00\xffhandle")

    def destroy_shared_memory_region(self, _handle):
        self.said.append(("destroy",))


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
    library = _Cuda()
    monkeypatch.setattr(shared_memory, "_cuda_module", lambda: library)
    return library


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
    assert cuda.said == [("create", region.size, 0), ("destroy",)]
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


def test_without_cuda(monkeypatch):
    """Without a GPU or its library the error says what to install, or to do instead."""

    def absent():
        raise ImportError("cuda")

    monkeypatch.setattr(shared_memory, "_cuda_module", absent)

    with (
        pytest.raises(ServerError, match=r"(?s)No memory on GPU 0.*Share system memory instead"),
        shared_memory.in_shared_memory("127.0.0.1:1", REQUESTS, "cuda"),
    ):
        pass


def test_more_than_the_machine_has(monkeypatch):
    """Writing past the memory there is would kill the process, so that is refused before."""
    usage = namedtuple("usage", "free")  # noqa: PYI024
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage(16))

    with (
        pytest.raises(ServerError, match=r"16 free.*--shm-size"),
        shared_memory.in_shared_memory("127.0.0.1:1", REQUESTS, "system"),
    ):
        pass
