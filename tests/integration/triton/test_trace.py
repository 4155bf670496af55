import stat
from dataclasses import replace

import numpy as np
import pytest

from enginegate.candidate import TensorSpec
from enginegate.errors import DataError, ModelError, ServerError
from enginegate.evidence import Load, ServingConfig
from enginegate.triton.deploy import deployed
from enginegate.triton.server import Server
from enginegate.triton.trace import recorded
from enginegate.triton.traffic import run_load

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("triton")]


@pytest.mark.usefixtures("scale")
def test_a_recording_holds_what_was_sent_and_answered(server, traffic, samples):
    """Every third request comes back with id, order, version, inputs and outputs to six digits."""
    load = Load(rate_per_s=200, duration_s=1.5, seed=5)

    with recorded(server, "scale", one_in=3, max_requests=1000) as recorder:
        result = run_load(server.grpc, traffic, load)
        modes = {stat.S_IMODE(file.stat().st_mode) for file in recorder.folder.iterdir()}
    recording = recorder.read()
    sample = recording.sample("shadow", 40)

    assert recording.lost == ()
    assert len(recording.requests) == len(result.due_s) // 3
    assert modes == {0o600}
    assert list(recorder.folder.iterdir()) == []
    assert len(sample.data) == 40
    sent = np.concatenate([samples[int(name.split(".")[0])]["x"] for name in sample.data.ids])
    np.testing.assert_allclose(sample.data.inputs["x"], sent, rtol=1e-5)
    np.testing.assert_allclose(sample.outputs["y"], 2 * sent, rtol=1e-5)
    assert set(sample.model_versions) == {1}
    assert (np.diff(sample.arrival_ns) >= 0).all()
    assert np.ptp(sample.arrival_ns) < 1.5e9


@pytest.mark.usefixtures("scale")
def test_no_more_than_asked_is_recorded(server, client):
    """The server itself stops at the limit, and batches become one sample a row."""
    with recorded(server, "scale", one_in=1, max_requests=4) as recorder:
        for value in range(10):
            client.infer("scale", {"x": np.full((3, 4), value, np.float32)})
    recording = recorder.read()

    assert len(recording.requests) == 4
    assert len(recording.sample("shadow", 100).data) == 12
    assert len(recording.sample("shadow", 5).data) == 5


@pytest.mark.usefixtures("scale")
def test_settings_are_restored_after_a_failure(server, client):
    """An error while recording puts the settings back and deletes what was recorded."""
    client.set_trace({"trace_rate": ("77",)}, "scale")
    before = client.trace_settings("scale")
    during = {}

    def interrupted():
        with recorded(server, "scale", one_in=1, max_requests=100):
            during.update(client.trace_settings("scale"))
            client.infer("scale", {"x": np.zeros((1, 4), np.float32)})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    after = client.trace_settings("scale")
    client.set_trace({"trace_rate": None}, "scale")
    assert during["trace_level"] == ("TIMESTAMPS", "TENSORS")
    assert after == before
    assert client.trace_settings("scale") == client.trace_settings()
    assert list(server.trace_file.parent.iterdir()) == []


@pytest.mark.usefixtures("scale")
def test_nothing_sent_is_an_error(server):
    """A recording without a request says what to do instead of giving an empty sample."""
    with recorded(server, "scale", one_in=1, max_requests=4) as recorder:
        pass

    with pytest.raises(DataError, match=r"(?s)no request was recorded.*Send more traffic"):
        recorder.read().sample("shadow", 10)


def test_types_that_a_trace_cannot_hold_are_refused(server, scale_model):
    """Bytes are printed as characters by Triton, so such a model is refused before tracing."""
    model = replace(
        scale_model("bytes"), inputs=(TensorSpec(name="x", dtype="uint8", shape=(-1, 4)),)
    )
    with deployed(server, model) as deployment:
        config = deployment.model.config(
            ServingConfig(max_batch_size=1, max_queue_delay_us=0, instances=1)
        )
        deployment.client.load("bytes", config, timeout_s=30)

        with (
            pytest.raises(ModelError, match=r"cannot hold x: uint8"),
            recorded(server, "bytes", one_in=1, max_requests=1),
        ):
            pass


def test_a_remote_server_cannot_be_recorded():
    """Another machine's trace files cannot be read, so the remedy is a sample made there."""
    with (
        pytest.raises(ServerError, match=r"\[data\] shadow"),
        recorded(Server(grpc="127.0.0.1:1", version="2"), "m", one_in=1, max_requests=1),
    ):
        pass
