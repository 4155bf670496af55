"""A model that never ends, to open or to run, is given up in time."""

import threading
import time

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginegate.data import DataSet
from enginegate.engines import open_onnx
from enginegate.errors import InputError, ModelError, TookTooLongError, ToolError
from enginegate.policy.model_source import ModelSource
from enginegate.precision.calibration import CalibrationSample
from enginegate.precision.deadline import limit_opening, run_in_time
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
    """A model of a thousand operators: ONNX Runtime can be stopped between any two."""
    nodes = [
        helper.make_node("Add", ["x" if i == 0 else f"v{i}", "c"], [f"v{i + 1}"])
        for i in range(1_000)
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


class StoppableOptions(ort.SessionOptions):
    """Tells when ONNX Runtime was asked to stop opening."""

    def __init__(self):
        super().__init__()
        self.stopped = threading.Event()

    def set_load_cancellation_flag(self, flag):
        """Ask, and tell."""
        super().set_load_cancellation_flag(flag)
        self.stopped.set()


@pytest.fixture
def open_when_stopped(monkeypatch):
    """Opens a model within a limit, but only after ONNX Runtime was asked to stop."""
    monkeypatch.setenv("ENGINEGATE_OPEN_TIMEOUT_S", "0.01")

    def open_late(open_it):
        options = StoppableOptions()
        with limit_opening(options, what="it"):
            assert options.stopped.wait(60)
            open_it(options)

    return open_late


def test_opening_is_stopped_while_it_is_under_way(long_chain, open_when_stopped):
    """ONNX Runtime is asked to stop, and does."""
    with pytest.raises(TookTooLongError, match=r"did not open it within 0\.01 s") as refused:
        open_when_stopped(
            lambda options: ort.InferenceSession(
                long_chain, options, providers=["CPUExecutionProvider"]
            )
        )

    assert isinstance(refused.value.__cause__, Exception)


def test_open_that_ended_too_late_is_refused(open_when_stopped):
    """An operator that is under way is not interrupted, and it may be the last."""
    with pytest.raises(TookTooLongError, match=r"did not open it within 0\.01 s") as refused:
        open_when_stopped(lambda _: None)

    assert refused.value.__cause__ is None


def test_slow_open_is_refused(long_chain, monkeypatch):
    """Whichever way it is opened."""
    monkeypatch.setenv("ENGINEGATE_OPEN_TIMEOUT_S", "0.000001")

    with pytest.raises(ModelError, match=r"did not open .*chain\.onnx within 1e-06 s"):
        open_onnx(long_chain).__enter__()
    with pytest.raises(ModelError, match="did not open a candidate"):
        open_cpu_session(long_chain, what="a candidate")


class LastOperatorSession:
    """Runs one operator that cannot be interrupted, and answers after it was asked to stop."""

    def run(self, _names, inputs, options):
        """Give the input back."""
        while not options.terminate:
            time.sleep(0.001)
        return [inputs["x"]]


def test_run_that_ended_too_late_is_refused(monkeypatch):
    """Its outputs are there, and still nobody gets them."""
    monkeypatch.setenv("ENGINEGATE_RUN_TIMEOUT_S", "0.01")

    with pytest.raises(TookTooLongError, match=r"on 4 samples, took longer than 0\.01 s"):
        run_in_time(LastOperatorSession(), None, DATA.inputs)


def test_zero_limit_is_refused(long_chain, monkeypatch):
    """It is said which variable is wrong."""
    monkeypatch.setenv("ENGINEGATE_OPEN_TIMEOUT_S", "soon")

    with pytest.raises(InputError, match="ENGINEGATE_OPEN_TIMEOUT_S is 'soon'"):
        open_cpu_session(long_chain, what="a candidate")
