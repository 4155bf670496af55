"""Shared by this folder: Triton with a model on it, object storage, and the wheel installed."""

from pathlib import Path

import boto3
import numpy as np
import pytest
from moto.server import ThreadedMotoServer

from enginegate.benchmark.deployment import ServedModel, deploy
from enginegate.candidate import TensorSpec
from enginegate.loadgen.traffic import Traffic
from enginegate.object_storage import ObjectStore
from enginegate.serving import BackendSettings, ServingConfig
from enginegate.triton.install import find_triton
from enginegate.triton.server import start
from tests.fakes.fault_proxy import fault_proxy
from tests.fakes.object_servers import (
    azure_settings,
    azurite,
    azurite_is_missing,
    make_container,
    s3_settings,
)
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


@pytest.fixture(scope="session")
def endpoint():
    """The address of an S3 API server."""
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture(scope="session")
def azure_endpoint(tmp_path_factory):
    """The address of a server of Azure's Blob API."""
    if problem := azurite_is_missing():
        pytest.skip(problem)
    with azurite(tmp_path_factory.mktemp("azurite")) as address:
        yield address


@pytest.fixture
def environment(endpoint, monkeypatch):
    """What a user sets to reach the S3 API server."""
    for name, value in s3_settings(endpoint).items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.fixture
def store(environment, request):  # noqa: ARG001
    """An empty prefix of a bucket behind the S3 API."""
    boto3.client("s3").create_bucket(Bucket="releases")
    return _emptied(f"s3://releases/{_prefix(request)}")


@pytest.fixture(params=["s3", "azure"])
def provider(request, environment):
    """How to reach each provider's server from an address: of it, or of a proxy before it."""
    if request.param == "s3":
        boto3.client("s3").create_bucket(Bucket="releases")
        return request.getfixturevalue("endpoint"), s3_settings, "s3"
    address = request.getfixturevalue("azure_endpoint")
    make_container(address, "releases")
    for name, value in azure_settings(address).items():
        environment.setenv(name, value)
    return address, azure_settings, "az"


@pytest.fixture
def any_store(provider, request):
    """An empty prefix of a bucket, in turn behind each provider's protocol."""
    return _emptied(f"{provider[2]}://releases/{_prefix(request)}")


@pytest.fixture
def faulty(any_store, provider, monkeypatch):
    """That prefix through a proxy, and the proxy, which loses and delays what it is asked to."""
    address, settings, _ = provider
    with fault_proxy(address) as proxy:
        for name, value in settings(proxy.address).items():
            monkeypatch.setenv(name, value)
        yield ObjectStore(any_store.url), proxy


def _prefix(request):
    return request.node.name.partition("[")[0].replace("_", "-")


def _emptied(url):
    made = ObjectStore(url)
    for key in made.keys(""):
        made.delete(key)
    return made
