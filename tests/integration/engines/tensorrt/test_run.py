"""A plan's process: fed through shared memory, and an error instead of a wait when it fails."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from enginegate.candidate import Candidate, TensorSpec
from enginegate.engines.tensorrt import library as libraries
from enginegate.engines.tensorrt import run
from enginegate.engines.tensorrt.library import VARIABLE, TensorRtLibrary, find_library
from enginegate.errors import BuildError, DataError, ModelError, TookTooLongError

SPECS = (
    TensorSpec(name="x", dtype="float32", shape=(-1, 3)),
    TensorSpec(name="k", dtype="int32", shape=(-1, 1)),
)


@pytest.fixture
def opened(foreign, tmp_path, monkeypatch):
    """Opens the plan that adds, with a fault."""

    def make(fault="", inputs=SPECS, *, shares=True):
        monkeypatch.setenv("FAULT", fault)
        monkeypatch.setenv("PROFILE", "shared" if shares else "")
        plan = tmp_path / "model.plan"
        plan.write_bytes(b"plan")
        library = TensorRtLibrary(foreign, "tensorrt", "tensorrt", "8.6.0")
        engine = SimpleNamespace(
            candidate=Candidate.parse("tensorrt-fp16"),
            builder="tensorrt 8.6.0.12",
            max_batch_size=4,
            flags={"shares_profile": str(shares).lower()},
            inputs=inputs,
            outputs=(TensorSpec(name="y", dtype="float32", shape=(-1, 3)),),
        )
        return run.plan_runner(library, engine, plan, gpu="sm90 NVIDIA H200")

    return make


def rows(count, first=0):
    x = np.arange(first, first + count * 3, dtype=np.float32).reshape(count, 3)
    return {"x": x, "k": np.arange(count, dtype=np.int64).reshape(count, 1)}


@pytest.mark.parametrize("count", [1, 3, 4, 5, 71])
@pytest.mark.parametrize("fault", ["", "unpinned"])
def test_rows_come_back_whole_and_in_order(opened, count, fault):
    """Any number of rows, padded to buckets of up to four, through memory that grows as needed."""
    inputs = rows(count)

    with opened(fault) as runner:
        small = runner.run(rows(1))["y"]
        answer = runner.run(inputs)["y"]

    np.testing.assert_array_equal(small, rows(1)["x"])
    np.testing.assert_array_equal(answer, inputs["x"] + inputs["k"])
    assert runner.device == "sm90 NVIDIA H200"


@pytest.mark.parametrize("shares", [True, False])
def test_sizes_that_alternate_keep_their_own_graphs(opened, shares):
    """No graph is changed by another one's shapes or addresses; old plans have one context."""
    with opened(shares=shares) as runner:
        for count in (4, 1, 2, 4, 1, 9, 2, 4, 13):
            answer = runner.run(rows(count))["y"]
            np.testing.assert_array_equal(answer, rows(count)["x"] + rows(count)["k"])

    assert runner.device == "sm90 NVIDIA H200"


def test_runs_without_a_graph_are_said_to_be(opened):
    """Where a graph cannot be captured the plan is launched one by one, and the device says so."""
    with opened("no-graph") as runner:
        answer = runner.run(rows(5))["y"]

    np.testing.assert_array_equal(answer, rows(5)["x"] + rows(5)["k"])
    assert runner.device == "sm90 NVIDIA H200, without CUDA graphs (no capture here)"


def test_bound_runs_are_timed_in_the_process(opened):
    """Inputs are copied once; seconds are the other process's own."""
    with opened() as runner, runner.bound(rows(3)) as repeat:
        seconds = repeat(50)

        np.testing.assert_array_equal(runner.run(rows(3))["y"], rows(3)["x"] + rows(3)["k"])
    assert seconds > 0.0


def test_numbers_beyond_int32_are_refused(opened):
    """A plan of TensorRT 8 takes 32 bits; a value that needs more is named, never cut."""
    inputs = rows(2) | {"k": np.array([[1], [2**40]])}

    with (
        opened() as runner,
        pytest.raises(
            DataError, match=r"input\.k holds 1 to 1099511627776; the engine takes int32"
        ),
    ):
        runner.run(inputs)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        pytest.param("dies-on-load", ModelError, "was killed by SIGABRT", id="dies-on-load"),
        pytest.param("refused", ModelError, "refuses to load it on this device", id="refused"),
        pytest.param("garbage", ModelError, "answered b'Hello from another", id="garbage"),
    ],
)
def test_a_plan_that_cannot_be_opened_is_an_error(opened, fault, error, message):
    """Crash, refusal and nonsense are each named, with candidate, builder and GPU."""
    with pytest.raises(error, match=rf"tensorrt-fp16 \(tensorrt 8\.6.*H200.*{message}"):
        opened(fault).__enter__()


def test_a_process_that_dies_in_a_run_is_an_error(opened):
    """Nobody waits for an answer that cannot come."""
    with (
        pytest.raises(ModelError, match="the process that ran it was killed by SIGABRT"),
        opened("dies-on-run") as runner,
    ):
        runner.run(rows(2, first=-1))


def test_a_process_that_hangs_is_killed(opened, monkeypatch):
    """After the deadline it is an error that says where to look, and the process is gone."""
    monkeypatch.setattr(run, "_ANSWER_S", 1.0)

    with (
        pytest.raises(TookTooLongError, match="did not answer within 1 s, and its process was kil"),
        opened("hangs-on-run") as runner,
    ):
        runner.run(rows(2, first=-1))


def test_plan_with_another_signature_is_refused(opened):
    """A plan whose inputs are not the manifest's is not run."""
    wrong = (SPECS[0], TensorSpec(name="k", dtype="int64", shape=(-1, 1)))

    with pytest.raises(ModelError, match=r"'k': 'int32'.*its manifest says.*Build it again"):
        opened(inputs=wrong).__enter__()


def test_the_named_python_is_asked(foreign, monkeypatch):
    """The variable decides where TensorRT is looked for; nothing is loaded onto a device."""
    monkeypatch.setenv(VARIABLE, foreign)
    libraries._find.cache_clear()

    found = find_library("tensorrt")

    assert found is not None
    assert (str(found), found.python) == ("tensorrt 8.6.0", foreign)
    assert found.is_weakly_typed
    assert found.highest_opset == 17
    libraries._find.cache_clear()


@pytest.mark.parametrize(
    ("python", "message"),
    [
        pytest.param(
            "/no/such/python", "ENGINEGATE_TENSORRT=/no/such/python cannot be run", id="no"
        ),
        pytest.param(sys.executable, "has no TensorRT that can build: tensorrt: ", id="lacks"),
        pytest.param("/bin/false", "ended with status 1 while it imported tensorrt", id="fails"),
    ],
)
def test_a_python_without_tensorrt_is_an_error(monkeypatch, python, message):
    """A variable that names something else is said to, with the reason."""
    monkeypatch.setenv(VARIABLE, python)
    libraries._find.cache_clear()

    for _ in range(3):
        with pytest.raises(BuildError, match=message):
            find_library()
    assert libraries._find.cache_info().misses == 1
