"""What a refused load is called, so that a search can go on without that configuration."""

from types import SimpleNamespace

import pytest

from enginegate.benchmark import deployment as deployment_module
from enginegate.benchmark.deployment import DeployedModel
from enginegate.errors import ModelError, NotLoadedError, ServerError
from enginegate.serving import ServingConfig
from enginegate.triton.gpu_memory import GpuMemory
from enginegate.triton.repository_files import check_model_files

CONFIG = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)
MODEL = SimpleNamespace(name="m", config=lambda *_: None, probe=dict)


def _fails(*_, **__):
    raise ServerError("failed to allocate memory")


def test_refused_load_is_no_dead_server():
    """A load that is refused has an error of its own, with what the server said."""
    deployment = DeployedModel(None, SimpleNamespace(load=_fails), MODEL, load_timeout_s=1.0)

    with pytest.raises(NotLoadedError, match="failed to allocate memory"):
        deployment.serve(CONFIG)

    assert deployment.serving is None


def test_loaded_model_without_answer_is_a_server_error():
    """What goes wrong after the load is not taken for a configuration that does not load."""
    client = SimpleNamespace(load=lambda *_, **__: None, infer=_fails)
    deployment = DeployedModel(None, client, MODEL, load_timeout_s=1.0)

    with pytest.raises(ServerError) as caught:
        deployment.serve(CONFIG)

    assert not isinstance(caught.value, NotLoadedError)


@pytest.mark.parametrize(
    ("backend", "opened"),
    [("python", "model.py"), ("onnxruntime", "model.onnx"), ("tensorrt", "model.plan")],
)
def test_file_the_backend_opens_must_exist(tmp_path, backend, opened):
    """Triton never ends the load of a Python model without its file."""
    path = tmp_path / "engine.bin"
    path.touch()

    check_model_files("m", backend, {opened: path})
    with pytest.raises(ModelError, match=f"{backend} backend, but has no {opened}"):
        check_model_files("m", backend, {"engine.bin": path})


def _gpus(*used):
    return tuple(GpuMemory(number, 1000, each) for number, each in enumerate(used))


def test_gpu_memory_of_a_model_is_what_its_own_runs_changed(monkeypatch):
    """Loaded, loaded anew with more, and another model came in between: that one is not counted."""
    readings = iter([_gpus(5, 7), _gpus(105, 57), _gpus(405, 57), _gpus(455, 147), ()])
    monkeypatch.setattr(deployment_module, "server_memory", lambda _: next(readings))
    model = SimpleNamespace(gpu=True)
    server = SimpleNamespace(grpc="h:1", metrics="h:3", pid=None)
    deployed = DeployedModel(server, None, model, load_timeout_s=1.0)

    first = deployed.taken_since(deployed.memory())
    second = deployed.taken_since(deployed.memory())

    assert (first, second) == (100, 150)
    assert deployed.taken_since(_gpus(1, 1)) is None


def test_model_on_the_processor_has_no_gpu_memory():
    """Nothing is asked about it."""
    deployed = DeployedModel(None, None, SimpleNamespace(gpu=False), load_timeout_s=1.0)

    assert deployed.taken_since(deployed.memory()) is None
