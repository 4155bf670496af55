import json

import numpy as np
import pytest

from enginegate.errors import DataError
from enginegate.triton.trace_file import read_traces


def _objects(trace_id, request_id="r", x="1,2", shape="1,2", model="m"):
    """What Triton 2.51 writes for one request, in its order."""
    who = {"id": trace_id, "model_name": model, "model_version": 3, "request_id": request_id}

    def stamp(name, ns):
        return {"id": trace_id, "timestamps": [{"name": name, "ns": ns}]}

    def tensor(activity, name, data):
        body = {"name": name, "data": data, "shape": shape, "dtype": "FP32"}
        return {"id": trace_id, "activity": activity, "tensor": body}

    return [
        who,
        stamp("REQUEST_START", 1000 * trace_id),
        tensor("TENSOR_QUEUE_INPUT", "x", x),
        tensor("TENSOR_BACKEND_OUTPUT", "y", x),
        stamp("COMPUTE_START", 1000 * trace_id + 100),
        stamp("REQUEST_END", 1000 * trace_id + 500),
    ]


def _write(path, *traces):
    items = [item for trace in traces for item in trace]
    path.write_text(json.dumps(items, separators=(",", ":")))
    return path


def test_requests_come_in_order_of_arrival(tmp_path):
    """Two files, written out of order, give one sequence; other models are left out."""
    late = _write(tmp_path / "trace.json.0", _objects(5, x="5,5"), _objects(9, model="other"))
    early = _write(tmp_path / "trace.json.1", _objects(2, x="2.5,nan"))

    recording = read_traces([late, early], "m")

    assert recording.lost == ()
    assert [request.trace_id for request in recording.requests] == [2, 5]
    first = recording.requests[0]
    assert (first.request_id, first.model_version, first.arrival_ns) == ("r", 3, 2000)
    assert first.stages_ns == {"REQUEST_START": 2000, "COMPUTE_START": 2100, "REQUEST_END": 2500}
    np.testing.assert_array_equal(first.inputs["x"], np.array([[2.5, np.nan]], np.float32))


def test_every_cut_loses_only_the_record_it_hits(tmp_path):
    """Cut a file of three requests at any character: whole requests before the cut survive."""
    path = _write(tmp_path / "trace.json", *(_objects(number) for number in (1, 2, 3)))
    text = path.read_text()
    ends = [text.index(f'"REQUEST_END","ns":{number}500') + 25 for number in (1, 2, 3)]

    for cut in range(0, len(text), 7):
        path.write_text(text[:cut])
        recording = read_traces([path], "m")

        whole = [number for number, end in zip((1, 2, 3), ends, strict=True) if end < cut]
        assert [request.trace_id for request in recording.requests][: len(whole)] == whole
        assert len(recording.requests) <= len(whole) + 1
        started = [number for number in (1, 2, 3) if f'{{"id":{number},"model_name"' in text[:cut]]
        if len(recording.requests) < len(started) and f'"id":{started[-1]},"model_version"' in text:
            assert recording.lost


def test_a_request_broken_off_in_the_middle_is_reported(tmp_path):
    """A request that breaks off at any character, between two good ones, loses only itself."""
    good, bad, after = (json.dumps(_objects(number))[1:-1] for number in (1, 2, 3))
    path = tmp_path / "trace.json"

    for cut in range(12, len(bad) - 1, 5):
        path.write_text(f"[{good},{bad[:cut]},{after}]")
        recording = read_traces([path], "m")

        assert [request.trace_id for request in recording.requests] == [1, 3]
        assert recording.lost

    path.write_text(f"[{good},{bad[:30]},{after}]")
    assert "trace.json: damaged at character" in read_traces([path], "m").lost[0]


def test_a_quote_in_a_request_id_costs_that_request_only(tmp_path):
    """Triton escapes nothing, so such a request is damaged; the next one is not."""
    bad = json.dumps(_objects(1)).replace('"r"', '"a"b"')[1:-1]
    path = tmp_path / "trace.json"
    path.write_text(f"[{bad},{json.dumps(_objects(2))[1:-1]}]")

    recording = read_traces([path], "m")

    assert [request.trace_id for request in recording.requests] == [2]
    assert recording.lost


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"x": "1,2,3"}, "x has 3 values for shape (1, 2)", id="too-many-values"),
        pytest.param({"x": "1,two"}, "request 1", id="not-a-number"),
        pytest.param({"shape": "1,z"}, "request 1", id="shape-no-number"),
    ],
)
def test_a_tensor_that_does_not_fit_is_lost(tmp_path, change, said):
    """Values that do not match the shape, or are no numbers, lose that request with the reason."""
    path = _write(tmp_path / "trace.json", _objects(1, **change), _objects(2))

    recording = read_traces([path], "m")

    assert [request.trace_id for request in recording.requests] == [2]
    assert any(said in reason for reason in recording.lost)


def test_a_sample_has_one_row_a_sample(tmp_path):
    """Batches become rows with unique ids; a request of a rarer shape is left out."""
    path = _write(
        tmp_path / "trace.json",
        _objects(1, "a", x="1,2"),
        _objects(2, "a", x="3,4,5,6", shape="2,2"),
        _objects(3, "b", x="7,8,9", shape="1,3"),
    )

    sample = read_traces([path], "m").sample("shadow", 10)

    assert sample.data.ids.tolist() == ["a.1", "a.2#0", "a.2#1"]
    np.testing.assert_array_equal(sample.data.inputs["x"], [[1, 2], [3, 4], [5, 6]])
    assert sample.arrival_ns.tolist() == [1000, 2000, 2000]
    assert sample.model_versions.tolist() == [3, 3, 3]
    assert len(read_traces([path], "m").sample("shadow", 2).data) == 2


def test_an_empty_recording_says_what_to_do(tmp_path):
    """No readable request is an error that names the first damage."""
    path = tmp_path / "trace.json"
    path.write_text('[{"id":1,"model_na')

    with pytest.raises(DataError, match=r"(?s)no request was recorded.*damaged at character 1"):
        read_traces([path], "m").sample("shadow", 2)
