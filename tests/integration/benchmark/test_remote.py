"""A model on a server that somebody else runs is measured as it is configured there."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from enginegate.cli.app import app
from enginegate.data import DataSet, write_data
from enginegate.errors import ExitCode, InputError, ServerError
from enginegate.measurement import Measurement
from tests.integration.conftest import PLAIN

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("triton")]

POLICY = Path(__file__).parents[3] / "policies" / "digits.toml"


@pytest.fixture
def benchmark(tmp_path, monkeypatch):
    """The verb with a policy whose data fits the plain model; where its results go."""
    x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    data = DataSet("test", {"x": x}, None, np.arange(40).astype(np.str_), {})
    write_data(data, tmp_path / "x.npz")
    text = POLICY.read_text().replace("p99_ms = 150", "p99_ms = 4000")
    text = text.replace(".enginegate/data/digits/evaluation.npz", str(tmp_path / "x.npz"))
    text = text.replace(".enginegate/data/digits/traffic.npz", str(tmp_path / "x.npz"))
    (tmp_path / "policy.toml").write_text(text)
    monkeypatch.setenv("ENGINEGATE_HOME", str(tmp_path / "workspace"))

    def run(*arguments):
        command = ["benchmark", str(tmp_path / "policy.toml"), "--out", str(tmp_path / "out")]
        return CliRunner().invoke(app, [*command, *arguments])

    run.out = tmp_path / "out"
    return run


def test_remote_load_is_measured_without_changing_the_server(benchmark, scale, server):
    """The configuration in force, at the load asked for; the exit code says whether p99 is met."""
    shown = benchmark(
        "--server", server.grpc, "--model", "scale", "--rate", "300", "--seconds", "2"
    )

    assert shown.exit_code in {ExitCode.OK, ExitCode.INCONCLUSIVE}, shown.output
    measured = Measurement.read(benchmark.out / "measurement.json")
    assert (measured.config, measured.load.rate_per_s) == (PLAIN, 300)
    assert measured.failed == 0
    assert measured.stages is not None
    assert "300/s poisson" in shown.output
    assert scale.serving == PLAIN


def test_closed_loop_is_measured_there(benchmark, scale, server):
    """Clients that wait for their answers: the highest throughput, for comparison."""
    del scale
    benchmark("--server", server.grpc, "--model", "scale", "--load", "closed:2", "--seconds", "0.5")

    assert Measurement.read(benchmark.out / "measurement.json").load.clients == 2


def test_model_that_is_not_there_lists_those_that_are(benchmark, scale, server):
    """A typing mistake needs no second tool."""
    del scale
    shown = benchmark("--server", server.grpc, "--model", "scael")

    assert isinstance(shown.exception, ServerError)
    assert "scale" in str(shown.exception).partition("Ready there")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--candidate", "onnxruntime-fp7"], "It has: onnxruntime-fp32", id="name"),
        pytest.param(["--load", "heavy"], "no load pattern 'heavy'", id="load"),
        pytest.param(["--load", "closed:0"], "no load pattern 'closed:0'", id="no-clients"),
        pytest.param(["--load", "closed:4"], "go with --server", id="closed-search"),
        pytest.param(
            ["--server", "h:1", "--candidate", "onnxruntime-int8"], "--model", id="candidate-there"
        ),
    ],
)
def test_wrong_use_is_refused_before_anything_runs(benchmark, arguments, message):
    """With the choices there are."""
    shown = benchmark(*arguments)

    assert isinstance(shown.exception, InputError)
    assert message in str(shown.exception)
