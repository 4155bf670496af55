import time

import numpy as np
import pytest

from enginegate.benchmark.deployment import deploy
from enginegate.errors import ServerError
from enginegate.serving import ServingConfig
from enginegate.triton.client import TritonClient
from enginegate.triton.types import Statistics

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("triton")]


@pytest.mark.usefixtures("scale")
def test_infer_returns_values_and_the_version_that_made_them(client):
    """A reply holds every output, exact, and the model version that answered."""
    x = np.arange(12, dtype=np.float32).reshape(3, 4)

    reply = client.infer("scale", {"x": x})

    assert reply.model_version == "1"
    np.testing.assert_array_equal(reply.outputs["y"], 2 * x)


@pytest.mark.usefixtures("scale")
def test_index_and_readiness_tell_what_serves(client):
    """The index row of a loaded model is READY, and readiness is asked per model and version."""
    row = next(row for row in client.index() if row.name == "scale")

    assert (row.version, row.ready) == (1, True)
    assert client.live()
    assert client.ready()
    assert client.model_ready("scale", "1")
    assert not client.model_ready("scale", "2")
    assert not client.model_ready("nobody")


@pytest.mark.usefixtures("scale")
def test_statistics_count_requests_samples_and_stages(client):
    """The difference of two readings counts what was sent between them."""
    before = client.statistics_since("scale", Statistics(), answers=1)

    for _ in range(5):
        client.infer("scale", {"x": np.zeros((2, 4), np.float32)})

    counted = client.statistics_since("scale", before, answers=5)
    assert (counted.requests, counted.inferences, counted.failures) == (5, 10, 0)
    assert counted.batches == {2: 5}
    assert counted.compute_infer_ns > 0
    assert counted.queue_ns > 0


def test_config_comes_back_with_its_parameters(client, scale):
    """What was sent with the load is what the server says is in force."""
    found = client.config("scale")

    assert found.serving == scale.serving
    assert found.versions == (1,)
    assert client.parameters("scale")["enginegate.serving"] == scale.serving.digest


@pytest.mark.parametrize(
    ("call", "said"),
    [
        pytest.param(
            lambda c: c.infer("nobody", {"x": np.zeros((1, 4), np.float32)}),
            r"(?s)could not answer for nobody.*NOT_FOUND.*Load the model first",
            id="unknown-model",
        ),
        pytest.param(
            lambda c: c.infer("scale", {"x": np.zeros((1, 5), np.float32)}),
            r"(?s)could not answer for scale.*INVALID_ARGUMENT.*Compare names",
            id="wrong-shape",
        ),
        pytest.param(
            lambda c: c.infer("scale", {"z": np.zeros((1, 4), np.float32)}),
            r"(?s)could not answer for scale.*INVALID_ARGUMENT",
            id="wrong-input",
        ),
        pytest.param(
            lambda c: c.load("nobody"),
            r"(?s)could not load nobody.*server's log says why",
            id="load-unknown",
        ),
        pytest.param(
            lambda c: c.statistics("nobody"), "could not count nobody", id="statistics-unknown"
        ),
        pytest.param(lambda c: c.config("nobody"), "configuration of nobody", id="config-unknown"),
        pytest.param(
            lambda c: c.set_trace({"trace_rate": ("often",)}, "scale"),
            "could not trace scale",
            id="trace-rate-no-number",
        ),
    ],
)
@pytest.mark.usefixtures("scale")
def test_errors_name_the_server_the_model_and_the_remedy(client, call, said):
    """Every refusal is a ServerError with the address, what was asked, and what to do."""
    with pytest.raises(ServerError, match=said) as caught:
        call(client)

    assert client.address in str(caught.value)


def test_unreachable_server_is_an_error():
    """A dead address is not live, and asking it is an error that says what to check."""
    with TritonClient("127.0.0.1:1", timeout_s=2.0) as nobody:
        assert not nobody.live()
        with pytest.raises(ServerError, match=r"(?s)127.0.0.1:1 could not name itself.*Check that"):
            nobody.metadata()


def test_load_past_its_deadline_says_that_it_may_still_come(server, client, scale_model):
    """A deadline on a load is not a cancellation, and the error says so."""
    slow = scale_model("slow_load", sleep_ms=400)
    config = slow.config(ServingConfig(max_batch_size=2, max_queue_delay_us=0, instances=1))

    with deploy(server, slow):
        assert client.ready()
        with pytest.raises(ServerError, match="a deadline does not stop a load"):
            client.load("slow_load", config, timeout_s=0.3)
        deadline = time.monotonic() + 60.0
        while not client.model_ready("slow_load"):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_model_that_fails_to_load_gives_its_reason(server, client, scale_model):
    """What the model raised while loading is in the error and in the index."""
    broken = scale_model("broken", fail="no such engine")
    config = broken.config(ServingConfig(max_batch_size=2, max_queue_delay_us=0, instances=1))

    with deploy(server, broken):
        with pytest.raises(ServerError, match="no such engine"):
            client.load("broken", config)
        reasons = [row.reason for row in client.index() if row.name == "broken"]

    assert "no such engine" in reasons[0]
