"""One real server for a module, and two models on it."""

from pathlib import Path

import pytest

from enginegate.benchmark.deployment import ServedModel, deploy
from enginegate.candidate import TensorSpec
from enginegate.serving import ServingConfig
from enginegate.triton.install import find_triton
from enginegate.triton.server import start

_SCALE = Path(__file__).parents[1] / "models" / "scale.py"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A running server with an empty repository of its own."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "repository").mkdir()
    install = find_triton(tmp_path_factory.mktemp("triton"))
    with start(install, folder / "repository", folder=folder) as running:
        yield running


@pytest.fixture(scope="module")
def scale(server):
    """A served model that answers 2 x; its name."""
    x = TensorSpec(name="x", dtype="float32", shape=(-1, 4))
    model = ServedModel(
        name="scale",
        backend="python",
        inputs=(x,),
        outputs=(x.model_copy(update={"name": "y"}),),
        files={"model.py": _SCALE},
    )
    with deploy(server, model) as deployment:
        deployment.serve(ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1))
        yield model.name
