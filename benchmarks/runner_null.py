"""An engine that computes nothing, on a GPU that the host imitates, for `runner_profile`.

Its tensors are those of a sentence encoder: two of 128 INT64 tokens in, 384 floats out. A batch
takes the time it is told, during which no other process computes, as kernels of several processes
take turns on one GPU. Copies between the host and this GPU cost the host nothing.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from enginegate.candidate import TensorSpec
from enginegate.engines.python_backend import runner_files

BUCKETS = (1, 8, 32, 128)
INPUTS = tuple(
    TensorSpec(name=name, dtype="int64", shape=(-1, 128))
    for name in ("input_ids", "attention_mask")
)
OUTPUTS = (TensorSpec(name="sentence", dtype="float32", shape=(-1, 384)),)
_ENGINE = """
import fcntl, time

def open_for_triton(folder, content, manifest, parameters, device_id):
    return Engine(folder / "gpu.lock", float(parameters["batch_s"]), float(parameters["row_s"]))

class Engine:
    buckets = BUCKETS
    def __init__(self, gpu, batch_s, row_s):
        self.gpu, self.batch_s, self.row_s = open(gpu, "a"), batch_s, row_s
    def lane(self, stream):
        return self
    def bind(self, inputs, memory, *, warm):
        rows = inputs["input_ids"].shape[0]
        outputs = {"sentence": memory("sentence", (rows, 384), "float32")}
        return outputs, lambda: self.compute(self.batch_s + self.row_s * rows)
    def compute(self, seconds):
        if seconds <= 0:
            return
        fcntl.flock(self.gpu, fcntl.LOCK_EX)
        time.sleep(seconds)
        fcntl.flock(self.gpu, fcntl.LOCK_UN)
"""
_DEVICE = """
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
    def upload(self, address, array): pass
    def download(self, array, address): pass
    def copy(self, target, source, size): pass
    def record(self, event): pass
    def wait_for(self, event): pass
    def wait(self): pass
"""


def null_files(folder: Path) -> Mapping[str, Path]:
    """What a version's folder needs to serve it; written to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = {
        "candidate": {"kind": "nothing", "precision": "fp32"},
        "filename": "model.nothing",
        "file": {"sha256": hashlib.sha256(b"").hexdigest()},
    }
    texts = {
        "engine_nothing.py": _ENGINE.replace("BUCKETS", repr(BUCKETS)),
        "device.py": _DEVICE,
        "model.nothing": "",
        "engine.json": json.dumps(manifest),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    ours = runner_files("nothing", folder / "engine_nothing.py", gpu=True)
    return {**ours, **{name: folder / name for name in texts}}
