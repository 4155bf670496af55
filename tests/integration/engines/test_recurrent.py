"""Recurrent layers and control flow are built and proven with ONNX Runtime, or refuted."""

import numpy as np
import onnx
import pytest

from enginegate.candidate import Candidate
from enginegate.data import DataSet
from enginegate.engines import build_engine, open_engine, open_reference, plan_engine
from enginegate.policy import parse_policy
from tests.fakes import recurrent
from tests.integration.engines.conftest import POLICY
from tests.integration.precision.conftest import kept_onnx

pytestmark = pytest.mark.xdist_group("engines")

MODELS = {kind: getattr(recurrent, kind) for kind in ("gru", "scan", "loop", "branch")}
LAYERS = {"gru": 2, "scan": 3, "loop": 2, "branch": 3}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Builds a model at a precision; gives the engine, the FP32 source and the samples."""
    root = tmp_path_factory.mktemp("recurrent")
    rules = parse_policy({**POLICY, "calibration": {"method": "max"}}, "test policy")

    def build(kind, name):
        source = kept_onnx(MODELS[kind](), root / kind)
        axes = source.value.inputs[0].shape[1:]
        values = np.random.default_rng(0).normal(size=(16, *axes)).astype(np.float32)
        data = DataSet("x.npz", {"x": values}, None, np.arange(16).astype(str), {})
        plan = plan_engine(
            source, Candidate.parse(name), tables=rules.engine_tables, calibration=data
        )
        return build_engine(plan, root / "engines"), source, data

    return build


@pytest.mark.parametrize("kind", list(MODELS))
def test_fp32_is_proven_and_answers_like_the_reference(made, kind):
    """Layers in the bodies of Loop and Scan are read as what they are, before and after fusing."""
    built, source, data = made(kind, "onnxruntime-fp32")
    proof = built.value.proof

    assert proof.proven, proof.detail
    assert proof.weighted_layers == proof.executed_layers == {"fp32": LAYERS[kind]}
    with (
        open_engine(built.value, built.folder) as engine,
        open_reference(source.value, source.folder) as fp32,
    ):
        expected = fp32.run(dict(data.inputs))["logits"]
        np.testing.assert_allclose(engine.run(dict(data.inputs))["logits"], expected, atol=1e-5)


@pytest.mark.parametrize("kind", list(MODELS))
def test_int8_of_the_last_layer_alone_is_refuted(made, kind):
    """ONNX Runtime's tools quantise neither a GRU nor a body: only the last layer becomes INT8."""
    built, _, _ = made(kind, "onnxruntime-int8")
    proof = built.value.proof

    assert proof.weighted_layers == {"fp32": LAYERS[kind] - 1, "int8": 1}
    assert not proof.proven
    assert "Less than half of it computes in int8" in proof.detail


@pytest.mark.filterwarnings("ignore:The tensor attributes")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, of its own
def test_gru_that_torch_exports_is_one_recurrent_layer():
    """torch.onnx writes the operator GRU, which is counted."""
    import torch

    from enginegate.precision import graph_stats

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = torch.nn.GRU(8, 16, batch_first=True)
            self.head = torch.nn.Linear(16, 4)

        def forward(self, x):
            return self.head(self.gru(x)[1][-1])

    shapes = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(Network().eval(), (torch.randn(3, 12, 8),), dynamic_shapes=shapes)
    exported = torch.onnx.export(program, dynamo=True, opset_version=20, verbose=False)
    model = onnx.load_from_string(exported.model_proto.SerializeToString())

    stats = graph_stats(model)
    assert (stats.layers, stats.recurrent) == ({"fp32": 2}, {"fp32": 1})
