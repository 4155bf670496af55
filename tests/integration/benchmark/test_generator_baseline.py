import pytest

from enginegate.benchmark import generator_baseline
from enginegate.errors import ServerError
from enginegate.loadgen.traffic import Transport
from enginegate.triton.server import connect

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("triton")]


def test_generators_own_cost(server, client, monkeypatch):
    """Latencies of a model that does nothing, and a rate that was kept up with; then it is gone."""
    monkeypatch.setattr(generator_baseline, "_TRIAL_S", 0.3)

    found = generator_baseline.calibrate(
        server, sending=Transport(protocol="http", shared_memory="system"), up_to_per_s=200
    )

    assert 0 < found.null_p50_ms <= found.null_p99_ms
    assert 0 <= found.trusted_per_s <= 200
    assert (found.driver, found.processes) == ("python", 1)
    assert not any(row.name == "enginegate_null" and row.ready for row in client.index())


def test_server_of_somebody_else(server):
    """No model is placed on a server that was not started here."""
    with pytest.raises(ServerError, match="not started here"):
        generator_baseline.calibrate(connect(server.grpc), sending=Transport(), up_to_per_s=100)
