"""A small CNN in a real MLflow registry, its ONNX, and plans made from it."""

import onnx
import pytest

from enginegate.candidate import Candidate
from enginegate.engines import plan_engine
from enginegate.policy import parse_policy
from tests.fakes.registry import cnn_network, cnn_registry, exporter, images

GATES = {
    "confidence": 0.95,
    "min_samples": 1,
    "max_accuracy_loss": 0.1,
    "min_slice_samples": 1,
    "max_slice_accuracy_loss": 0.1,
    "min_top1_agreement": 0.9,
    "max_kl_p99_nats": 0.1,
    "max_abs_error": 1.0,
}
POLICY = {
    "schema_version": 1,
    "name": "cnn",
    "task": "classification",
    "model": {"uri": "models:/cnn/1"},
    "data": {"evaluation": "eval.npz"},
    "candidates": {"onnxruntime": ["fp32"], "tensorrt": []},
    "gates": {"default": GATES},
    "slo": {"p99_ms": 10.0, "min_throughput_per_s": 1.0, "confidence": 0.99},
    "search": {
        "max_batch_sizes": [1, 8],
        "queue_delays_us": [0],
        "instances": [1],
        "min_rate_per_s": 10.0,
        "max_rate_per_s": 10.0,
        "measurement_s": 1.0,
        "budget_s": 1.0,
    },
    "target": {"repository": "live"},
    "approval": {"expires_hours": 1.0},
}


@pytest.fixture(scope="session")
def samples():
    """The images."""
    return images()


@pytest.fixture(scope="session")
def network():
    """The CNN."""
    return cnn_network()


@pytest.fixture(scope="session")
def registry(tmp_path_factory):
    """The registry that holds it."""
    return cnn_registry(tmp_path_factory.mktemp("registry"))


@pytest.fixture(scope="session")
def export(registry):
    """Exports a source into a folder."""
    return exporter(registry)


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """A store that all tests of a session share, so that an engine is built once."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="session")
def cnn(export, store):
    """The registered CNN as ONNX in the store."""
    return export("models:/cnn/1", store / "onnx")


@pytest.fixture(scope="session")
def plan(cnn, samples):
    """Plans an engine of the CNN by name; ``tensorrt`` and ``calibration`` are policy tables."""

    def make(name, *, onnx=cnn, data=samples, **tables):
        policy = parse_policy({**POLICY, **tables}, "test policy")
        return plan_engine(
            onnx, Candidate.parse(name), tables=policy.engine_tables, calibration=data
        )

    return make


@pytest.fixture
def fp32_onnx(cnn):
    """A copy of the CNN's ONNX that a test may change."""
    return onnx.load(cnn.folder / "model.onnx")
