import numpy as np
import pytest

from enginegate.data import DataSet
from enginegate.errors import ModelError, ServerError
from enginegate.loadgen.grpc_message import encode_request
from enginegate.loadgen.traffic import LoadResult, Traffic, Transport
from enginegate.measurement import ClosedLoad, Load
from enginegate.triton.codec import reply_of
from enginegate.triton.types import Statistics


def _load(**changes):
    return Load(**{"rate_per_s": 500.0, "duration_s": 20.0, "seed": 1, **changes})


def test_order_has_its_own_seed_and_uses_every_sample():
    """Each round holds every sample once, shuffled anew, independent of the arrivals."""
    traffic = Traffic(tuple(bytes([number]) for number in range(7)), order_seed=5)
    order = traffic.order()
    first, second = ([next(order) for _ in range(7)] for _ in range(2))

    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second
    again = traffic.order()
    assert [next(again) for _ in range(7)] == first


@pytest.mark.parametrize(
    ("load", "cores", "beside_server", "processes"),
    [
        pytest.param(_load(rate_per_s=6000), 8, True, 1, id="one-suffices"),
        pytest.param(_load(rate_per_s=6001), 8, True, 2, id="one-does-not"),
        pytest.param(_load(rate_per_s=33_000), 16, True, 6, id="a-gpus-worth"),
        pytest.param(_load(rate_per_s=90_000), 8, True, 4, id="half-is-the-servers"),
        pytest.param(_load(rate_per_s=90_000), 8, False, 7, id="server-elsewhere"),
        pytest.param(_load(rate_per_s=90_000), 1, True, 1, id="one-core"),
        pytest.param(ClosedLoad(clients=65, duration_s=1, seed=0), 8, True, 2, id="many-clients"),
    ],
)
def test_as_many_processes_as_rate_and_cores_allow(load, cores, beside_server, processes):
    """Processes follow the load, and leave the server its cores, unless a number is named."""
    here = {"cores": cores, "beside_server": beside_server}

    assert Transport().processes_for(load, **here) == processes
    assert Transport(processes=5).processes_for(load, **here) == 5


def _result(due_s, sent_s):
    return LoadResult(
        load=_load(),
        due_s=due_s,
        sent_s=sent_s,
        latency_s=np.full(len(due_s), 0.1),
        samples=np.zeros(len(due_s), np.int64),
        versions=np.full(len(due_s), "1"),
        errors={},
        cpu_share=0.5,
        lasted_s=1.0,
    )


@pytest.mark.parametrize("sends", [2, 3, 7, 100])
def test_achieved_share_is_sent_over_asked_rate(sends):
    """Sent over asked for, whatever the absolute delay of all requests."""
    due_s = np.arange(sends) / sends

    result = _result(due_s, 1.25 * due_s + 0.5)

    assert result.achieved_share == pytest.approx(0.8)
    assert result.late_s[0] == 0.5


@pytest.mark.parametrize("late", [slice(0, 5), slice(40, 50), slice(95, 100)], ids=str)
def test_stall_leaves_the_achieved_share(late):
    """A few late requests, be they the first or the last, leave the rate as it was."""
    due_s = np.arange(100) / 100
    sent_s = due_s + 0.001
    sent_s[late] += 0.1

    assert _result(due_s, sent_s).achieved_share == pytest.approx(1.0)


@pytest.mark.parametrize("due_s", [[], [0.5], [0.5, 0.5]], ids=len)
def test_without_a_span_there_is_no_rate_to_miss(due_s):
    """Nothing, or everything at once, is as asked for."""
    assert _result(np.array(due_s), np.array(due_s) + 0.1).achieved_share == 1.0


def test_requests_from_data_carry_ids_and_one_sample():
    """A data set gives one request a sample, under the sample's id."""
    data = DataSet(
        "here", {"x": np.arange(6, dtype=np.float32).reshape(3, 2)}, None, np.array(list("abc")), {}
    )

    traffic = Traffic.from_data("m", data)

    assert traffic.requests == tuple(
        encode_request("m", {"x": data.inputs["x"][row : row + 1]}, request_id=name)
        for row, name in enumerate("abc")
    )


def test_unsupported_dtype_is_refused():
    """Text cannot be sent, and the error lists what can."""
    with pytest.raises(ModelError, match="Supported"):
        encode_request("m", {"x": np.array([["text"]])})


class _Output:
    name, datatype, shape = "y", "FP32", (1, 4)


class _Message:
    model_name, model_version, id = "m", "1", "r"
    outputs = (_Output(),)

    def __init__(self, content):
        self.raw_output_contents = [content]


def test_empty_output_is_an_error():
    """A reply whose bytes do not fit its shape is refused, with the usual cause."""
    with pytest.raises(ServerError, match=r"(?s)16 bytes, but sent 0.*NumPy 2.*DLPack"):
        reply_of(_Message(b""))


def test_statistics_subtract_and_add():
    """Counters combine field by field, batch sizes by size."""
    earlier = Statistics(requests=10, queue_ns=100, batches={1: 5, 4: 2})
    later = Statistics(requests=30, queue_ns=700, batches={1: 5, 4: 3, 8: 2})

    between = later - earlier

    assert (between.requests, between.queue_ns) == (20, 600)
    assert between.batches == {4: 1, 8: 2}
    assert earlier + between == later
