"""One real server for all tests of this folder, a model to put on it, and the wheel installed."""

from pathlib import Path

import numpy as np
import pytest

from enginegate.benchmark.deployment import ServedModel, deploy
from enginegate.candidate import TensorSpec
from enginegate.loadgen.traffic import Traffic
from enginegate.serving import BackendSettings, ServingConfig
from enginegate.triton.install import find_triton
from enginegate.triton.server import start
from tests.wheels import build_wheel, install_wheel

PLAIN = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel of this checkout."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory):
    """The ``bin`` of an environment that has the wheel, and no checkout."""
    return install_wheel(wheel, tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="session")
def install(tmp_path_factory):
    """The server of this machine."""
    return find_triton(tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="session")
def server(install, tmp_path_factory):
    """A running server with an empty repository of its own."""
    folder = tmp_path_factory.mktemp("server")
    repository = folder / "repository"
    repository.mkdir()
    with start(install, repository, folder=folder) as running:
        yield running


@pytest.fixture(scope="session")
def scale_model():
    """Makes the description of a model that answers 2 x, slowly if told to."""

    def make(name, **parameters):
        x = TensorSpec(name="x", dtype="float32", shape=(-1, 4))
        y = TensorSpec(name="y", dtype="float32", shape=(-1, 4))
        source = Path(__file__).parent / "models" / "scale.py"
        return ServedModel(
            name=name,
            backend="python",
            inputs=(x,),
            outputs=(y,),
            files={"model.py": source},
            settings=BackendSettings(parameters={k: str(v) for k, v in parameters.items()}),
        )

    return make


@pytest.fixture(scope="session")
def scale(server, scale_model):
    """The plain model, served for the whole session."""
    with deploy(server, scale_model("scale")) as deployment:
        deployment.serve(PLAIN)
        yield deployment


@pytest.fixture
def client(server):
    """A connection to the server."""
    with server.client() as connection:
        yield connection


@pytest.fixture(scope="session")
def samples():
    """Fifty single requests, each with its own values."""
    source = np.random.default_rng(0)
    return [{"x": source.normal(size=(1, 4)).astype(np.float32)} for _ in range(50)]


@pytest.fixture(scope="session")
def traffic(samples):
    """Those requests, for the plain model."""
    return Traffic.of("scale", samples)
