from collections import Counter

import numpy as np
import pytest

from enginegate.data import DataSet
from enginegate.errors import InputError
from enginegate.loadgen.grpc_sender import parse_request
from enginegate.loadgen.sample_order import batches
from enginegate.loadgen.traffic import Traffic


def _data(count):
    x = np.arange(count, dtype=np.float32).reshape(count, 1)
    return DataSet("here", {"x": x}, None, np.arange(count).astype(np.str_), {})


def _rows(request):
    message = parse_request(request)
    return np.frombuffer(message.raw_input_contents[0], np.float32).astype(int).tolist()


def test_mixed_batch_sizes_use_every_sample_in_the_proportion_asked_for():
    """Each round holds every size as often as it is named; all samples travel, under a first id."""
    traffic = Traffic.from_data("m", _data(20), batch_sizes=(1, 1, 1, 8), order_seed=3)

    sent = [_rows(request) for request in traffic.requests]
    assert Counter(map(len, sent)) == {1: 6, 8: 2}
    assert {row for rows in sent for row in rows} == set(range(20))
    assert [parse_request(r).id for r in traffic.requests] == [str(rows[0]) for rows in sent]


def test_a_request_may_hold_more_samples_than_there_are():
    """Samples repeat then, rather than the request being smaller than asked for."""
    assert sorted(next(iter(batches(3, (6,), seed=0)))) == [0, 0, 1, 1, 2, 2]


def test_single_samples_keep_their_order():
    """Without a mix, request i is sample i."""
    assert list(batches(4, (1, 1), seed=9)) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("sizes", [(), (0,), (4, -1)])
def test_sizes_that_cannot_be_sent(sizes):
    """A size below 1, or no size, is refused."""
    with pytest.raises(InputError, match="cannot be sent"):
        list(batches(4, sizes, seed=0))
