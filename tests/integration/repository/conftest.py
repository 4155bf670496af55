"""Real Tritons on live repositories, a real S3 API server, and releases that add a number."""

import shutil
import time
from dataclasses import replace

import numpy as np
import pytest

from enginegate.candidate import FileDigest, TensorSpec
from enginegate.decision import Promise
from enginegate.policy.operating import Ensemble, EnsembleStep
from enginegate.repository import Golden, Layout, LiveRepository, ObjectRepository, Package
from enginegate.repository.ensemble.composition import as_ensemble
from enginegate.repository.store.staging import place
from enginegate.triton.install import find_triton
from enginegate.triton.server import start
from tests.fakes.adding_model import ADDING_MODEL
from tests.fakes.evidence import INT8, SERVING, decision, scorecard
from tests.fakes.live_triton import FakeTriton

X = TensorSpec(name="x", dtype="float32", shape=(-1, 2))
Y = TensorSpec(name="y", dtype="float32", shape=(-1, 2))


@pytest.fixture(scope="session")
def install(tmp_path_factory):
    return find_triton(tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="session")
def shared_server(install, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    (folder / "repository").mkdir()
    with start(install, folder / "repository", folder=folder / "server") as running:
        yield running


@pytest.fixture
def server(shared_server):
    """The shared server, empty again afterwards."""
    yield shared_server
    with shared_server.client() as client:
        client.unload("digits")
        while client.model_ready("digits"):
            time.sleep(0.05)
    for left in shared_server.repository.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()


@pytest.fixture(scope="session")
def second_server(install, tmp_path_factory):
    folder = tmp_path_factory.mktemp("second")
    (folder / "repository").mkdir()
    with start(install, folder / "repository", folder=folder / "server") as running:
        yield running


@pytest.fixture
def second(second_server):
    """Another host's repository and server, empty again afterwards."""
    with second_server.client() as client:
        yield LiveRepository(second_server.repository, client, load_timeout_s=30.0)
        client.unload("digits")
        while client.model_ready("digits"):
            time.sleep(0.05)
    for left in second_server.repository.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()


@pytest.fixture
def root(server):
    return server.repository


@pytest.fixture
def repository(server, root):
    with server.client() as client:
        yield LiveRepository(root, client, load_timeout_s=30.0)


@pytest.fixture
def package(tmp_path):
    """Make what a release is made of; the model adds ``offset``."""

    def make(offset: float, **changes) -> Package:
        folder = tmp_path / "built" / str(offset)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.py").write_text(ADDING_MODEL)
        (folder / "engine.bin").write_text(str(offset))
        x = np.arange(8, dtype=np.float32).reshape(4, 2)
        card = scorecard()
        made = Package(
            model="digits",
            model_uri="models:/digits/1",
            candidate=INT8,
            engine_sha256=FileDigest.of(folder / "engine.bin").sha256,
            approved={"engine.bin": FileDigest.of(folder / "engine.bin")},
            files={name: folder / name for name in ("model.py", "engine.bin")},
            backend="python",
            gpu=False,
            inputs=(X,),
            outputs=(Y,),
            serving=SERVING,
            golden=Golden({"x": x}, {"y": x + np.float32(offset)}),
            golden_max_abs_error=1e-4,
            scorecard_sha256=card.digest,
            decision=decision(card),
            promise=Promise(p99_ms=9.0, throughput_per_s=400.0, slo_p99_ms=25.0),
        )
        return replace(made, **changes)

    return make


@pytest.fixture
def ask(repository):
    """Which version answers, and what it adds."""

    def once() -> tuple[int, float]:
        reply = repository.client.infer("digits", {"x": np.zeros((1, 2), np.float32)})
        return int(reply.model_version), float(reply.outputs["y"][0, 0])

    return once


STEP = """
import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        xs = [np.from_dlpack(pb.get_input_tensor_by_name(r, "IN")) for r in requests]
        return [
            pb.InferenceResponse([pb.Tensor.from_dlpack("OUT", np.ascontiguousarray(x * FACTOR))])
            for x in xs
        ]
"""
STEP_CONFIG = """
backend: "python"
max_batch_size: 16
input { name: "IN" data_type: TYPE_FP32 dims: 2 }
output { name: "OUT" data_type: TYPE_FP32 dims: 2 }
"""


@pytest.fixture
def steps(tmp_path):
    """An ensemble's rules: raw x 2 -> x, the engine, y x 10 -> score; as folders of a team."""
    for name, factor in (("before", 2.0), ("after", 10.0)):
        folder = tmp_path / "steps" / name
        folder.mkdir(parents=True)
        (folder / "config.pbtxt").write_text(STEP_CONFIG)
        code = STEP.replace("FACTOR", f"np.float32({factor})")
        (folder / "model.py").write_text(code)
    return Ensemble(
        before=(
            EnsembleStep(
                name="double",
                folder=tmp_path / "steps" / "before",
                inputs={"IN": "raw"},
                outputs={"OUT": "x"},
            ),
        ),
        after=(
            EnsembleStep(
                name="tenfold",
                folder=tmp_path / "steps" / "after",
                inputs={"IN": "y"},
                outputs={"OUT": "score"},
            ),
        ),
    )


@pytest.fixture
def ensemble(package, steps):
    """Make an ensemble's package: it answers (2 raw + offset) x 10, or (x + offset) x 10.

    ``engine`` are changes of the engine inside.
    """

    def make(offset: float, *, rules: Ensemble = steps, engine=None, **changes) -> Package:
        raw = np.arange(6, dtype=np.float32).reshape(3, 2)
        given, x = ("raw", 2 * raw) if rules.before else ("x", raw)
        answers = Golden({given: raw}, {"score": (x + np.float32(offset)) * 10})
        whole = as_ensemble(package(offset, **(engine or {})), rules, lambda _: answers)
        return replace(whole, **changes)

    return make


@pytest.fixture
def here(store, repository):
    """This host: it publishes."""
    return ObjectRepository(store, "digits", repository)


@pytest.fixture
def there(store, second):
    """Another host: it follows."""
    return ObjectRepository(store, "digits", second)


@pytest.fixture
def host(store, tmp_path):
    """Make a host with a server in memory."""

    def make(name):
        root = tmp_path / name / "live"
        root.mkdir(parents=True)
        local = LiveRepository(root, FakeTriton(root), load_timeout_s=1.0)
        return ObjectRepository(store, "digits", local)

    return make


@pytest.fixture
def placed(package, ensemble, tmp_path):
    """A release's files, as a host has them before it uploads them; nothing serves."""

    def make(version: int = 1, *, parts: bool = False):
        root = tmp_path / "placed"
        root.mkdir()
        made = ensemble(1.0) if parts else package(1.0)
        return root, place(Layout(root, "digits"), made, version, None)

    return make
