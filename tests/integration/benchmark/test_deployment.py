from dataclasses import replace

import numpy as np
import pytest

from enginegate.benchmark.deployment import DeployedBenchmark, deploy
from enginegate.candidate import TensorSpec
from enginegate.errors import ModelError, ServerError
from enginegate.evidence import Outcome
from enginegate.loadgen.traffic import Traffic, Transport
from enginegate.measurement import ClosedLoad, Generator, Load
from enginegate.measuring.measure import read_latency_sample
from enginegate.measuring.p99 import SequentialTest
from enginegate.serving import ServingConfig, ServingOptions
from enginegate.triton.config import config_text, read_config
from enginegate.triton.server import Server
from enginegate.triton.types import Statistics

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("triton")]


def _serving(batch, delay_us, instances):
    return ServingConfig(max_batch_size=batch, max_queue_delay_us=delay_us, instances=instances)


def test_override_changes_what_the_running_server_does(
    server, client, scale_model, samples, tmp_path
):
    """A load with another configuration changes batching, delay and instances without a restart."""
    load = Load(rate_per_s=150, duration_s=1.0, seed=1)
    with deploy(server, scale_model("tuned", sleep_ms=10)) as deployment:
        bench = DeployedBenchmark(
            deployment, Traffic.of("tuned", samples), tmp_path, slo_p99_ms=100
        )

        slow = bench.measure(_serving(1, 0, 1), load)
        alone = client.config("tuned").serving
        fast = bench.measure(_serving(8, 20_000, 2), load)
        together = client.config("tuned").serving

    assert (alone, together) == (_serving(1, 0, 1), _serving(8, 20_000, 2))
    assert slow.measurement.stages.mean_batch_size == 1
    assert fast.measurement.stages.mean_batch_size > 1.5
    assert fast.over(100) < slow.over(100)


def test_load_that_perf_analyzer_cannot_finish_is_sent_again(
    server, scale_model, samples, tmp_path, monkeypatch
):
    """It stops at the first failure; this program counts them. Who insists on it gets the error."""
    program = tmp_path / "perf_analyzer"
    program.write_text("#!/bin/sh\necho a request failed\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PERF_ANALYZER", str(program))
    load = Load(rate_per_s=100, duration_s=0.5, seed=1)
    with deploy(server, scale_model("failing")) as deployment:
        bench = DeployedBenchmark(
            deployment,
            Traffic.of("failing", samples),
            tmp_path,
            slo_p99_ms=1000,
            driver="perf_analyzer",
        )
        with pytest.raises(ServerError, match="a request failed"):
            bench.measure(_serving(8, 0, 1), load)

        found = replace(bench, failures_counted=True).measure(_serving(8, 0, 1), load).measurement

    assert (found.generator.driver, found.failed) == ("python", 0)
    assert found.sent > 0


def test_run_ends_once_it_is_decided(server, scale_model, samples, tmp_path):
    """A run that is allowed to end does so long before its time, with its answer kept."""
    test, load = SequentialTest(0.99), Load(rate_per_s=100, duration_s=6.0, seed=1)
    with deploy(server, scale_model("hopeless", sleep_ms=40)) as deployment:
        bench = DeployedBenchmark(
            deployment, Traffic.of("hopeless", samples), tmp_path, slo_p99_ms=20
        )

        found = bench.measure(_serving(8, 0, 1), load, ends=test)

    measurement = found.measurement
    assert measurement.lasted_s < 4.0
    assert test.decide(len(found.latencies_ms), found.over(20)) is Outcome.FAILED
    assert read_latency_sample(measurement, tmp_path).over(20) == found.over(20)


def test_measurement_records_its_conditions(server, scale_model, samples, tmp_path):
    """Cold start once, the server's and the client's time, batches, cores, cost, and who sent."""
    with deploy(server, scale_model("noted", sleep_ms=5)) as deployment:
        traffic, known = Traffic.of("noted", samples), Generator(trusted_per_s=2000.0)
        bench = DeployedBenchmark(
            deployment, traffic, tmp_path, 200, generator=known, price_per_hour=1.0
        )

        first = bench.measure(_serving(4, 0, 1), Load(rate_per_s=100, duration_s=1.0, seed=1))
        again = bench.measure(_serving(4, 0, 1), ClosedLoad(clients=2, duration_s=0.3, seed=1))

    first, again = first.measurement, again.measurement
    assert (again.cold_start_s, first.cold_start_s > 0.005) == (None, True)
    assert first.stages.compute_infer_ms >= 5.0
    assert first.stages.client_ms > 0.0
    assert sum(size * runs for size, runs in first.stages.batches.items()) == first.sent
    assert first.resources.server_cores > 0.0
    assert first.resources.gpu_power_w is None
    assert first.resources.cost_per_million > 0.0
    assert (first.generator.processes, first.generator.trusted_per_s) == (1, 2000.0)
    assert 0 < again.throughput_per_s <= 400


def test_options_are_served_and_refusals_counted(server, client, scale_model, samples, tmp_path):
    """A queue limit of the options is in force, and what it refuses is a failure, over HTTP too."""
    options, load = ServingOptions(max_queue_size=2), Load(rate_per_s=200, duration_s=0.5, seed=1)
    with deploy(server, scale_model("limited", sleep_ms=50)) as deployment:
        traffic, sending = Traffic.of("limited", samples), Transport(protocol="http")
        bench = DeployedBenchmark(
            deployment, traffic, tmp_path, 500, options=options, sending=sending
        )

        found = bench.measure(_serving(1, 0, 1), load).measurement
        in_force = client.config("limited").message.dynamic_batching.default_queue_policy

    assert in_force.max_queue_size == 2
    assert found.failed > 0
    assert sum(found.errors.values()) >= found.failed
    assert found.percentile(0.99) is None


def test_loading_the_same_configuration_again_does_nothing(scale, client):
    """Asking for what is already in force does not reload: the counters go on."""
    began = client.statistics_since("scale", Statistics(), answers=1)
    client.infer("scale", {"x": np.zeros((1, 4), np.float32)})
    client.statistics_since("scale", began, answers=1)

    scale.serve(scale.serving)

    assert client.statistics("scale").requests == began.requests + 1


def test_undeployed_model_leaves_nothing_behind(server, client, scale_model):
    """After the block the model is unloaded and its folder is gone, also when the block raised."""

    def interrupted():
        with deploy(server, scale_model("passing")) as deployment:
            deployment.serve(_serving(2, 0, 1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    assert not (server.repository / "passing").exists()
    assert not client.model_ready("passing")


def test_missing_file_is_refused_before_the_load(server, scale_model, tmp_path):
    """A Python model without its file would hang the server, so nothing is placed or loaded."""
    model = replace(scale_model("hollow"), files={"model.py": tmp_path / "model.py"})

    with pytest.raises(ModelError, match=r"missing .*model\.py"), deploy(server, model):
        pass

    assert not (server.repository / "hollow").exists()


def test_model_of_somebody_else_is_not_removed(server, scale_model):
    """A folder that was not made for a benchmark is refused and stays."""
    folder = server.repository / "theirs" / "1"
    folder.mkdir(parents=True)

    with (
        pytest.raises(ServerError, match="not put there for a benchmark"),
        deploy(server, scale_model("theirs")),
    ):
        pass

    assert folder.is_dir()
    folder.rmdir()
    folder.parent.rmdir()


def test_remote_server_cannot_be_deployed_to(scale_model):
    """Files can only be placed on a server that was started here."""
    remote = Server(grpc="127.0.0.1:1", version="2.51.0")

    with (
        pytest.raises(ServerError, match="was not started here"),
        deploy(remote, scale_model("x")),
    ):
        pass


def test_config_survives_the_server(server, client, scale_model):
    """Odd characters, one number a sample, and every field come back as they were sent."""
    model = replace(
        scale_model("odd", note='quote " newline \n end'),
        outputs=(TensorSpec(name="y", dtype="float32", shape=(-1, 4)),),
    )
    with deploy(server, model) as deployment:
        deployment.serve(_serving(4, 250, 1))
        found = client.config("odd")

    assert found.parameters["note"] == 'quote " newline \n end'
    assert found.inputs == model.inputs
    assert read_config(config_text(found), "server") == found
