"""Where a request's time goes in our runner: ``python benchmarks/runner_profile.py``.

A real Triton serves an engine that computes nothing: as on a processor (``plain``), and through the
pipeline of a GPU, whose copies are made by the host here, with answers that are ``sent`` one by one
or ``returned`` together. Rows are small, so everything that is left is the price of a request:
Triton's shared memory, reading, joining, and answering. ``--row-us`` lets the engine sleep for each
row, as a host does while a GPU computes. Needs no GPU. Times of a batch are the runner's own
counters.
"""

import argparse
import hashlib
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np

from enginegate.candidate import TensorSpec
from enginegate.engines.python_backend import runner_files
from enginegate.loadgen.traffic import Traffic, run_load
from enginegate.measurement import ClosedLoad
from enginegate.measuring.measure import throughput
from enginegate.serving import ServingConfig
from enginegate.triton.config import config_text, model_config
from enginegate.triton.install import find_triton
from enginegate.triton.metrics import read_metrics
from enginegate.triton.server import Server, start

_LARGEST, _WIDTH = 64, 16
_WAYS = ("plain", "sent", "returned")
_STAGES = ("slot", "fill", "compute", "answer")
_ENGINE = """
import time

def open_for_triton(folder, content, manifest, parameters, device_id):
    return (Plain if parameters["as"] == "plain" else Pipelined)(float(parameters["row_s"]))

class Plain:
    def __init__(self, row_s):
        self.row_s = row_s
    def run(self, names, inputs):
        time.sleep(self.row_s * len(inputs["x"]))
        return [inputs["x"]]

class Pipelined:
    buckets = (1, 8, 16, 32, 64)
    def __init__(self, row_s):
        self.row_s = row_s
    def lane(self, stream):
        return self
    def bind(self, inputs, memory, *, warm):
        x = inputs["x"]
        y = memory("y", x.shape, x.dtype)
        return {"y": y}, lambda: time.sleep(self.row_s * x.shape[0])
"""
_DEVICE = """
import ctypes
import numpy as np

class GpuDevice:
    def __init__(self, number=0):
        self.memory = {}
    def bind(self): pass
    def allocate(self, size):
        array = np.zeros(size, np.uint8)
        self.memory[array.ctypes.data] = array
        return array.ctypes.data
    def free(self, address):
        del self.memory[address]
    def pinned(self, size):
        return np.zeros(size, np.uint8)
    def free_pinned(self, memory): pass
    def stream(self):
        return self
    def event(self):
        return self
    def upload(self, address, array):
        ctypes.memmove(address, array.ctypes.data, array.nbytes)
    def download(self, array, address):
        ctypes.memmove(array.ctypes.data, address, array.nbytes)
    def copy(self, target, source, size):
        ctypes.memmove(target, source, size)
    def record(self, event): pass
    def wait_for(self, event): pass
    def wait(self): pass
"""


def _place(repository: Path, how: str, row_s: float) -> None:
    version, on_gpu = repository / how / "1", how != "plain"
    version.mkdir(parents=True)
    (module := repository.parent / "engine_nothing.py").write_text(_ENGINE)
    for filename, source in runner_files("nothing", module, gpu=on_gpu).items():
        shutil.copyfile(source, version / filename)
    if on_gpu:
        (version / "device.py").write_text(_DEVICE)
    (version / "model.nothing").write_bytes(b"")
    manifest = {
        "candidate": {"kind": "nothing", "precision": "fp32"},
        "filename": "model.nothing",
        "file": {"sha256": hashlib.sha256(b"").hexdigest()},
    }
    (version / "engine.json").write_text(json.dumps(manifest))
    config = model_config(
        name=how,
        inputs=(TensorSpec(name="x", dtype="float32", shape=(-1, _WIDTH)),),
        outputs=(TensorSpec(name="y", dtype="float32", shape=(-1, _WIDTH)),),
        serving=ServingConfig(max_batch_size=_LARGEST, max_queue_delay_us=500, instances=1),
        backend="python",
        parameters={"as": how, "row_s": str(row_s)} | ({"answers": how} if on_gpu else {}),
        gpu=on_gpu,
    )
    config.message.instance_group[0].kind = config.message.instance_group[0].KIND_CPU
    (version.parent / "config.pbtxt").write_text(config_text(config))


def _measured(server: Server, name: str, rows: int, clients: int, duration_s: float) -> str:
    traffic = Traffic.of(name, [{"x": np.zeros((rows, _WIDTH), np.float32)}])
    with server.client() as client:
        before = client.statistics(name)
        result = run_load(
            server.grpc, traffic, ClosedLoad(clients=clients, duration_s=duration_s, seed=1)
        )
        counted = client.statistics(name) - before
    batch = counted.inferences / counted.executions
    said = [
        f"{name:9s} {rows} rows, {clients:3d} in flight: {throughput(result):8,.0f} requests/s,",
        f"batch {batch:5.1f}; microseconds a request:",
        f"Triton copies in {counted.compute_input_ns / counted.requests / 1e3 / batch * rows:.1f},",
        f"execute {counted.compute_infer_ns / counted.requests / 1e3 / batch * rows:.1f}",
    ]
    told = {
        series.labels["counted"]: series.value
        for series in read_metrics(str(server.metrics)).matching("enginegate_runner", model=name)
    }
    if told:
        said += [f", {each} {told[each] / told['requests'] * 1e6:.1f}" for each in _STAGES]
    return " ".join(said).replace(" ,", ",")


def main() -> None:
    """Print a line for each way and number of clients."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--clients", type=int, nargs="+", default=[64, 192])
    parser.add_argument("--row-us", type=float, default=0.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        repository = folder / "repository"
        for how in _WAYS:
            _place(repository, how, arguments.row_us / 1e6)
        install = find_triton(folder / "triton")
        with start(install, repository, folder=folder / "server") as server:
            for how in _WAYS:
                for clients in arguments.clients:
                    with server.client(timeout_s=60) as client:
                        client.load(how)
                    print(_measured(server, how, 1, clients, arguments.seconds), flush=True)


if __name__ == "__main__":
    main()
