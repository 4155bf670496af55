"""An ensemble is derived from the steps' own configurations and the engine's tensors."""

import numpy as np
import pytest

from enginegate.candidate import TensorSpec
from enginegate.errors import DataError, ModelError
from enginegate.policy.operating import Ensemble, EnsembleStep
from enginegate.repository.ensemble.composition import compose, engine_step
from enginegate.repository.ensemble.record_golden import record_golden
from enginegate.repository.store.package import PartPackage
from enginegate.serving import BackendSettings, ServingConfig
from enginegate.triton.config import config_text, model_config
from enginegate.triton.ensemble_config import config_for_versions
from enginegate.triton.server import Server
from tests.fakes.evidence import release

X = TensorSpec(name="x", dtype="float32", shape=(-1, 2))
Y = TensorSpec(name="y", dtype="float32", shape=(-1, 2))
CONFIG = """backend: "python" max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: 2 }
output { name: "OUT" data_type: TYPE_FP32 dims: 2 }
"""
GOLDEN = """name: "m"
platform: "ensemble"
version_policy {
  specific {
    versions: 7
  }
}
max_batch_size: 4
input {
  name: "raw"
  data_type: TYPE_FP32
  dims: 2
}
output {
  name: "y"
  data_type: TYPE_FP32
  dims: 2
}
ensemble_scheduling {
  step {
    model_name: "m.pre"
    model_version: 7
    input_map {
      key: "IN"
      value: "raw"
    }
    output_map {
      key: "OUT"
      value: "x"
    }
  }
  step {
    model_name: "m.engine"
    model_version: 7
    input_map {
      key: "x"
      value: "x"
    }
    output_map {
      key: "y"
      value: "y"
    }
  }
}
parameters {
  key: "enginegate.releases"
  value {
    string_value: "release-7-d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1d1"
  }
}
"""


@pytest.fixture
def engine():
    """The engine as a composing model: x -> y, batches of up to 8."""
    serving = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)
    config = model_config(
        name="m.engine",
        inputs=(X,),
        outputs=(Y,),
        serving=serving,
        backend="python",
        parameters={},
    )
    return PartPackage(name="m.engine", config=config, files={})


@pytest.fixture
def step(tmp_path):
    """Make a team's folder, and the step that names it."""

    def make(name="pre", *, config=CONFIG, inputs=None, outputs=None) -> EnsembleStep:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "config.pbtxt").write_text(config)
        (folder / "model.py").write_text("")
        return EnsembleStep(
            name=name,
            folder=folder,
            inputs=inputs or {"IN": "raw"},
            outputs=outputs or {"OUT": "x"},
        )

    return make


def test_the_ensemble_is_golden(step, engine):
    """Inputs, outputs and the largest batch come from the models; every step is pinned."""
    composed = compose("m", Ensemble(before=(step(),)), engine)

    assert config_text(config_for_versions(composed.config, (7,), {7: "d1" * 32})) == GOLDEN
    assert [part.name for part in composed.parts] == ["m.pre", "m.engine"]
    assert list(composed.parts[0].files) == ["model.py"]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "engine"),
        ({"device": "gpu"}, "engine-gpu"),
        ({"backend": "onnxruntime"}, "engine-onnxruntime"),
        (
            {
                "backend": "onnxruntime",
                "device": "gpu",
                "settings": BackendSettings(cuda_provider={"use_tf32": "1"}),
            },
            "engine-onnxruntime-gpu-tf32",
        ),
        ({"backend": "tensorrt", "device": "gpu"}, "engine-tensorrt-gpu-b8"),
    ],
)
def test_engines_that_share_no_configuration_have_different_names(changes, name):
    """Each is a composing model of its own, so both can serve while the ensemble goes over."""
    serving = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)

    assert engine_step(release(serving=serving, **changes).engine) == name


def test_files_come_along_but_no_bytecode(step, engine, tmp_path):
    """Helpers in folders are part of the step; what Python left there is not."""
    rules = Ensemble(before=(step(),))
    for name in ("words/vocabulary.txt", "__pycache__/model.cpython-311.pyc"):
        (tmp_path / "pre" / name).parent.mkdir()
        (tmp_path / "pre" / name).write_text("")

    assert list(compose("m", rules, engine).parts[0].files) == ["model.py", "words/vocabulary.txt"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": CONFIG.replace("dims: 2", "dims: 3")}, r"m\.pre has x.*3\], and m\.engine nee"),
        ({"config": CONFIG.replace("FP32", "FP16")}, r"m\.pre has x: float16.*needs x: float32"),
        (
            {"outputs": {"OUT": "y"}},
            r"'y' of the ensemble is made by m\.pre, and made by m\.engine",
        ),
        (
            {"inputs": {"IN": "y"}},
            r"'y' of the ensemble is needed by m\.pre, and made by m\.engine",
        ),
        ({"name": "engine"}, "Two composing models.*'engine'"),
        ({"inputs": {"OTHER": "raw"}}, "names input 'OTHER'; its config.pbtxt has IN"),
        ({"outputs": {"OTHER": "x"}}, "names output 'OTHER'"),
        ({"config": CONFIG.replace("max_batch_size: 4", "")}, "takes no batches"),
        ({"config": CONFIG.replace('backend: "python"', "")}, "names no backend"),
        ({"config": 'platform: "ensemble" ' + CONFIG}, "is an ensemble itself"),
        ({"config": CONFIG + "sequence_batching {}"}, "keeps sequences"),
        ({"config": CONFIG.replace("TYPE_FP32", "TYPE_STRING")}, "TYPE_STRING cannot be read"),
        ({"config": "{"}, "is not a Triton configuration of a composing model"),
        ({"config": CONFIG.replace('"python"', '"onnxruntime"')}, r"pre has no model\.onnx"),
        ({"config": CONFIG + 'default_model_filename: "run.py"'}, r"pre has no run\.py"),
        ({"config": 'backend: "python" max_batch_size: 4'}, "lists no inputs"),
    ],
)
def test_mismatched_steps_are_refused_with_both_sides_named(step, engine, changes, message):
    """Triton would find some of it at load, and clients the rest."""
    with pytest.raises(ModelError, match=message):
        compose("m", Ensemble(before=(step(**changes),)), engine)


def _no_code(folder):
    (folder / "model.py").unlink()


def _link(folder):
    (folder / "data").symlink_to(folder / "model.py")


def _folder_link(folder):
    (folder / "data").symlink_to(folder.parent)


def _linked_config(folder):
    (folder / "config.pbtxt").rename(folder / "other")
    (folder / "config.pbtxt").symlink_to(folder / "other")


def _version(folder):
    (folder / "1").mkdir()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_no_code, "has no model.py"),
        (_link, "data is not a regular file"),
        (_folder_link, "data is not a regular file"),
        (_linked_config, "is no regular file"),
        (_version, "looks like a version"),
    ],
)
def test_invalid_step_folder_is_refused(step, engine, tmp_path, spoil, message):
    """A release holds only plain files of its own, and Triton must find the code among them."""
    rules = Ensemble(before=(step(),))

    spoil(tmp_path / "pre")

    with pytest.raises(ModelError, match=message):
        compose("m", rules, engine)


def test_path_outside_the_step_folder_is_refused():
    """A policy cannot name a step's folder with '..' in it."""
    with pytest.raises(ValueError, match="may not contain"):
        EnsembleStep(name="pre", folder="a/../../etc", inputs={}, outputs={})


def test_samples_must_be_the_ensembles_own(step, engine):
    """Before a server is touched: what the evaluation data has need not be what the whole takes."""
    composed = compose("m", Ensemble(before=(step(),)), engine)

    with pytest.raises(DataError, match=r"takes raw, and the samples have x.*ensemble\.samples"):
        record_golden(Server(grpc="nowhere:1", version="2.51.0"), composed, {"x": np.zeros((1, 2))})
