"""A model that never ends, to open or to run, is given up in time."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginegate.data import DataSet
from enginegate.engines import open_onnx
from enginegate.errors import InputError, ModelError, ToolError
from enginegate.policy.model_source import ModelSource
from enginegate.precision.calibration import CalibrationSample
from enginegate.precision.session import open_cpu_session, outputs_of
from enginegate.sources import onnx_from_source

DATA = DataSet("rows.npz", {"x": np.ones((4, 4), np.float32)}, None, np.arange(4).astype(str), {})


def _value(name, shape, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def _saved(path, nodes, constants):
    graph = helper.make_graph(
        nodes, "graph", [_value("x", ["batch", 4])], [_value("y", ["batch", 4])], constants
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path
    )
    return path


@pytest.fixture
def endless(tmp_path):
    """A model whose loop asks itself whether to go on, and always says yes."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("Add", ["state", "one"], ["more"]),
        ],
        "body",
        [
            _value("turn", [], TensorProto.INT64),
            _value("go", [], TensorProto.BOOL),
            _value("state", None),
        ],
        [_value("go_on", [], TensorProto.BOOL), _value("more", None)],
        [numpy_helper.from_array(np.float32(1), "one")],
    )
    loop = helper.make_node("Loop", ["", "yes", "x"], ["y"], body=body)
    return _saved(
        tmp_path / "endless.onnx", [loop], [numpy_helper.from_array(np.ones((), bool), "yes")]
    )


@pytest.fixture
def long_chain(tmp_path):
    """A model of ten thousand operators, which takes most of a second to open."""
    nodes = [
        helper.make_node("Add", ["x" if i == 0 else f"v{i}", "c"], [f"v{i + 1}"])
        for i in range(10_000)
    ]
    nodes[-1].output[0] = "y"
    return _saved(
        tmp_path / "chain.onnx", nodes, [numpy_helper.from_array(np.ones(4, np.float32), "c")]
    )


def test_source_with_endless_run_is_refused(endless, tmp_path, monkeypatch):
    """The first run that anybody makes of it is given up; the message says what to do."""
    monkeypatch.setenv("ENGINEGATE_RUN_TIMEOUT_S", "0.5")
    with pytest.raises(ModelError, match=r"longer than 0\.5 s and was given up: a Loop"):
        onnx_from_source(
            ModelSource(uri=f"file:{endless}"),
            DATA,
            onnx_root=tmp_path / "onnx",
            tracking_uri="sqlite:///nowhere",
            open_onnx=open_onnx,
        )


def test_endless_measured_model_is_stopped(endless, monkeypatch):
    """So is one that is converted."""
    monkeypatch.setenv("ENGINEGATE_RUN_TIMEOUT_S", "0.5")
    session = open_cpu_session(endless, what="a candidate")

    with pytest.raises(ToolError, match="was given up"):
        outputs_of(session, CalibrationSample(DATA, np.arange(4), 4))


def test_slow_open_is_stopped(long_chain, monkeypatch):
    """Whichever way it is opened."""
    monkeypatch.setenv("ENGINEGATE_OPEN_TIMEOUT_S", "0.000001")

    with pytest.raises(ModelError, match=r"did not open .*chain\.onnx within 1e-06 s"):
        open_onnx(long_chain).__enter__()
    with pytest.raises(ModelError, match="did not open a candidate"):
        open_cpu_session(long_chain, what="a candidate")


def test_zero_limit_is_refused(long_chain, monkeypatch):
    """It is said which variable is wrong."""
    monkeypatch.setenv("ENGINEGATE_OPEN_TIMEOUT_S", "soon")

    with pytest.raises(InputError, match="ENGINEGATE_OPEN_TIMEOUT_S is 'soon'"):
        open_cpu_session(long_chain, what="a candidate")
