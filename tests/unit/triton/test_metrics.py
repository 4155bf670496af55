import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from enginegate.errors import ServerError
from enginegate.triton.metrics import Metrics, read_metrics

TEXT = r"""
# HELP nv_inference_count Number of inferences performed (does not include cached requests)
# TYPE nv_inference_count counter
nv_inference_count{model="scale",version="1"} 41
nv_inference_count{model="scale",version="2"} 1.5e3 1395066363000
nv_inference_count{version="1",model="other",} 7
nv_inference_request_failure{model="a b{c}",reason="said \"no\", \\ twice\nover"} 0
nv_cpu_utilization 0.25
nv_gpu_power_limit{} NaN
"""


@pytest.fixture
def endpoint():
    """Serves a status and a text at a loopback address."""
    servers = []

    def serve(status, text):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_):
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"127.0.0.1:{server.server_port}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        pytest.param("nv_inference_count", {"model": "scale", "version": "1"}, 41.0, id="labels"),
        pytest.param("nv_inference_count", {"model": "other"}, 7.0, id="one-label-of-two"),
        pytest.param("nv_inference_count", {"version": "2"}, 1500.0, id="time-stamp"),
        pytest.param(
            "nv_inference_request_failure",
            {"model": "a b{c}", "reason": 'said "no", \\ twice\nover'},
            0.0,
            id="escapes",
        ),
        pytest.param("nv_cpu_utilization", {}, 0.25, id="no-labels"),
        pytest.param("nv_inference_count", {"model": "none"}, None, id="no-such-label"),
        pytest.param("nv_inference", {}, None, id="no-such-name"),
    ],
)
def test_value(name, labels, expected):
    """The one series with these labels has its value; none has None."""
    assert Metrics.parse(TEXT).value(name, **labels) == expected


def test_ambiguous_value_is_refused():
    """When several series match, no single one is picked."""
    with pytest.raises(ServerError, match="2 series of nv_inference_count"):
        Metrics.parse(TEXT).value("nv_inference_count", model="scale")


def test_matching_gives_every_series_with_the_labels():
    """Whatever other labels they carry; none where no series has the name."""
    metrics = Metrics.parse(TEXT)

    assert [s.value for s in metrics.matching("nv_inference_count", model="scale")] == [41, 1500]
    assert sum(s.value for s in metrics.matching("nv_inference_count")) == 1548.0
    assert list(metrics.matching("nv_nothing")) == []


@pytest.mark.parametrize(
    "line",
    [
        "<html>",
        "name",
        "name{a=b} 1",
        'name{a="b"',
        "1name 1",
        "name one",
        "{, =",
        pytest.param("name 1" + "0" * 400, id="too-large"),
    ],
)
def test_line_that_is_no_metric_is_refused(line):
    """A line that is no sample is named, so that a wrong address is noticed."""
    with pytest.raises(ServerError, match="no Prometheus metric"):
        Metrics.parse(line)


def test_duplicated_series_is_refused():
    """Of two values with one name and equal labels neither is believed, nor their sum."""
    lines = 'name{a="1",b="2"} 3\nname{a="1",b="3"} 3\nname{b="2",a="1"} 4'

    with pytest.raises(ServerError, match=r"name\{.*\} stands twice"):
        Metrics.parse(lines)


def test_endpoint_is_read(endpoint):
    """What an endpoint serves comes back as series."""
    metrics = read_metrics(endpoint(200, TEXT))

    assert metrics.value("nv_inference_count", model="other") == 7.0


def test_another_service_is_refused(endpoint):
    """An address without metrics says which port is meant."""
    with pytest.raises(ServerError, match=r"status 404[\s\S]*metrics port"):
        read_metrics(endpoint(404, "not here"))


def test_unreachable_address_is_a_server_error():
    """An address where nothing listens, and one that is none, are server errors."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ServerError, match="did not answer"):
            read_metrics(address, timeout_s=1.0)
    with pytest.raises(ServerError, match="no HOST:PORT"):
        read_metrics("metrics")
