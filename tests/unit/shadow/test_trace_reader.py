import json
import tracemalloc

import numpy as np
import pytest

from enginegate.shadow.trace_reader import Damage, TracedRequest, read_traces


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


def _read(*paths, model="m"):
    """Requests and reasons, apart."""
    items = list(read_traces(paths, model))
    requests = [item for item in items if isinstance(item, TracedRequest)]
    return requests, [item.reason for item in items if isinstance(item, Damage)]


def _write(path, *traces):
    items = [item for trace in traces for item in trace]
    path.write_text(json.dumps(items, separators=(",", ":")))
    return path


def test_requests_of_one_model_are_read(tmp_path):
    """Files give their requests in the order they were written; other models are left out."""
    first = _write(tmp_path / "trace.json.0", _objects(2, x="2.5,nan"), _objects(9, model="other"))
    second = _write(tmp_path / "trace.json.1", _objects(5, x="5,5"))

    requests, lost = _read(first, second)

    assert lost == []
    assert [request.trace_id for request in requests] == [2, 5]
    assert (requests[0].request_id, requests[0].model_version) == ("r", 3)
    assert requests[0].arrival_ns == 2000
    assert requests[0].stages_ns == {
        "REQUEST_START": 2000,
        "COMPUTE_START": 2100,
        "REQUEST_END": 2500,
    }
    np.testing.assert_array_equal(requests[0].inputs["x"], np.array([[2.5, np.nan]], np.float32))


def test_every_cut_loses_only_the_record_it_hits(tmp_path):
    """Cut a file of three requests at any character: whole requests before the cut survive."""
    path = _write(tmp_path / "trace.json", *(_objects(number) for number in (1, 2, 3)))
    text = path.read_text()
    ends = [text.index(f'"REQUEST_END","ns":{number}500') + 25 for number in (1, 2, 3)]

    for cut in range(0, len(text), 7):
        path.write_text(text[:cut])
        requests, lost = _read(path)

        whole = [number for number, end in zip((1, 2, 3), ends, strict=True) if end < cut]
        assert [request.trace_id for request in requests][: len(whole)] == whole
        assert len(requests) <= len(whole) + 1
        started = [number for number in (1, 2, 3) if f'{{"id":{number},"model_name"' in text[:cut]]
        if len(requests) < len(started) and f'"id":{started[-1]},"model_version"' in text:
            assert lost


def test_request_broken_off_in_the_middle_is_reported(tmp_path):
    """A request that breaks off at any character, between two good ones, loses only itself."""
    good, bad, after = (json.dumps(_objects(number))[1:-1] for number in (1, 2, 3))
    path = tmp_path / "trace.json"

    for cut in range(12, len(bad) - 1, 5):
        path.write_text(f"[{good},{bad[:cut]},{after}]")
        requests, lost = _read(path)

        assert [request.trace_id for request in requests] == [1, 3]
        assert lost

    path.write_text(f"[{good},{bad[:30]},{after}]")
    assert "trace.json: damaged at character" in _read(path)[1][0]


def test_pieces_of_any_size_give_the_same(tmp_path, monkeypatch):
    """Wherever the pieces that are read end, the same requests and damages come out."""
    good, bad, after = (json.dumps(_objects(number))[1:-1] for number in (1, 2, 3))
    path = tmp_path / "trace.json"
    path.write_text(f"[{good},{bad[:200]},{after}]")
    requests, lost = _read(path)

    for size in (1, 2, 3, 17, 64, 333):
        monkeypatch.setattr("enginegate.shadow.trace_reader._CHUNK_CHARACTERS", size)
        again, still_lost = _read(path)

        assert [request.trace_id for request in again] == [r.trace_id for r in requests] == [1, 3]
        assert still_lost == lost


def test_large_file_is_never_whole_in_memory(tmp_path):
    """Reading 16 MiB of traces takes a few MiB."""
    path = tmp_path / "trace.json"
    values = ",".join(["0.12345678901234567890123456789"] * 1024)
    with path.open("w") as file:
        for number in range(260):
            objects = _objects(number, x=values, shape="1,1024")
            file.write(json.dumps(objects, separators=(",", ":"))[1:-1] + ",")

    tracemalloc.start()
    count = sum(isinstance(item, TracedRequest) for item in read_traces([path], "m"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert path.stat().st_size > 16 << 20
    assert count == 260
    assert peak < 9 << 20


def test_quote_in_a_request_id_costs_that_request_only(tmp_path):
    """Triton escapes nothing, so such a request is damaged; the next one is not."""
    bad = json.dumps(_objects(1)).replace('"r"', '"a"b"')[1:-1]
    path = tmp_path / "trace.json"
    path.write_text(f"[{bad},{json.dumps(_objects(2))[1:-1]}]")

    requests, lost = _read(path)

    assert [request.trace_id for request in requests] == [2]
    assert lost


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"x": "1,2,3"}, "x has 3 values for shape (1, 2)", id="too-many-values"),
        pytest.param({"x": "1,secret"}, "x holds what is no number", id="not-a-number"),
        pytest.param({"shape": "1,secret"}, "x holds what is no number", id="shape-no-number"),
    ],
)
def test_tensor_that_does_not_fit_is_lost(tmp_path, change, said):
    """Values that do not fit lose that request; the reason does not repeat them."""
    path = _write(tmp_path / "trace.json", _objects(1, **change), _objects(2))

    requests, lost = _read(path)

    assert [request.trace_id for request in requests] == [2]
    assert any(said in reason for reason in lost)
    assert not any("secret" in reason for reason in lost)


@pytest.mark.parametrize(
    "text",
    [
        '{"id":"secret"}',
        '{"id":{"id":' + "[" * 100_000,
        '{"id":1,"timestamps":null}',
        '{"id":1,"timestamps":[{"name":"secret"}]}',
        '{"id":1,"activity":["secret"],"tensor":7}',
        '{"id":1,"model_name":"m","model_version":"secret"}',
    ],
    ids=["id-text", "deep", "null", "no-time", "odd-activity", "odd-version"],
)
def test_json_of_another_form_is_one_damage(tmp_path, text):
    """Well-formed JSON that Triton does not write is reported and repeats nothing."""
    path = tmp_path / "trace.json"
    path.write_text(f"[{text},{json.dumps(_objects(2))[1:-1]}]")

    requests, lost = _read(path)

    assert [request.trace_id for request in requests] == [2]
    assert lost
    assert not any("secret" in reason for reason in lost)
