import logging
import traceback
from dataclasses import replace

import numpy as np
import pytest

from enginegate.errors import DataError, PolicyError
from enginegate.policy.recording import Shadow
from enginegate.shadow import read_traffic_sample, sample_info
from enginegate.shadow.redaction import Preparation, Redaction

PRIVATE = "4242-private"


def lengths(inputs):
    """Names a slice by an input."""
    return {"sum": np.where(inputs["x"].sum(axis=1) > 10, "large", "small")}


def blurred(inputs, outputs):
    """Rounds an input, and leaves one out."""
    return {"x": inputs["x"].round(-1)}, outputs


def broken(*tensors):
    """Fails with the data in its message."""
    raise ValueError(PRIVATE, tensors)


def short(inputs, outputs):
    """Loses a row."""
    return {name: array[1:] for name, array in inputs.items()}, outputs


def prepared(**wanted):
    return Preparation.of(Shadow(**wanted))


@pytest.fixture
def block(block_of):
    plain = block_of(3)
    inputs = {**plain.inputs, "user": np.array([7, 8, 7], np.int64)}
    return replace(plain, inputs=inputs, request_ids=np.full(3, PRIVATE))


def test_dropped_inputs_are_nowhere(kept, block):
    """Neither the input nor the request id is in any byte of the sample."""
    path = kept(block, preparation=prepared(drop=("user", "request_id")))

    sample = read_traffic_sample(path)

    assert set(sample.data.inputs) == {"x"}
    assert sample.info.withheld == ("user",)
    assert set(sample.request_ids) == {""}
    assert all(PRIVATE.encode() not in file.read_bytes() for file in path.iterdir())


def test_hashes_tell_repeats_and_nothing_else(block):
    """Equal inputs have equal digests in one recording; the next one has another key."""
    first = Redaction(hash=frozenset({"user"})).apply(block)
    second = Redaction(hash=frozenset({"user"})).apply(block)

    digests = first.hashes["user"]
    assert digests[0] == digests[2] != digests[1]
    assert "user" not in first.inputs
    assert digests[0] != second.hashes["user"][0]
    assert "_key" not in repr(Redaction())


def test_outputs_only(kept, block):
    """No input at all is written; outputs and times are."""
    sample = read_traffic_sample(kept(block, preparation=prepared(outputs_only=True)))

    assert sample.data.inputs == {}
    assert set(sample.info.withheld) == {"x", "user"}
    assert len(sample.outputs["y"]) == len(sample.data) == 3


def test_redactor_rewrites_before_anything_is_written(kept, block):
    """What the user's code leaves out or rounds is all that the sample has."""
    sample = read_traffic_sample(kept(block, preparation=prepared(redactor=f"{__name__}:blurred")))

    assert set(sample.data.inputs) == {"x"}
    assert set(sample.data.inputs["x"].ravel() % 10) == {0.0}
    assert sample.info.rewritten


def test_misspelt_input_to_redact_is_refused(home, kept, block):
    """An input to redact that is not there stops the recording."""
    with pytest.raises(DataError, match="usr is to be redacted"):
        kept(block, preparation=prepared(drop=("usr",)))

    assert list(home.iterdir()) == []


@pytest.mark.parametrize("hook", ["slicer", "redactor"])
def test_failing_user_code_does_not_spill_data(kept, block, hook, caplog):
    """Message, chain of causes and log hold nothing of what was recorded."""
    caplog.set_level(logging.DEBUG)

    with pytest.raises(DataError, match="broken raised ValueError") as caught:
        kept(block, preparation=prepared(**{hook: f"{__name__}:broken"}))

    shown = "".join(traceback.format_exception(caught.value))
    assert PRIVATE not in shown
    assert PRIVATE not in caplog.text


def test_user_code_that_loses_rows_is_refused(kept, block):
    """Inputs and outputs must stay aligned."""
    with pytest.raises(DataError, match="another count of rows"):
        kept(block, preparation=prepared(redactor=f"{__name__}:short"))


@pytest.mark.parametrize("hook", ["no.such.module:f", f"{__name__}:no_such_function"])
def test_missing_hook_is_an_error(kept, block, hook):
    """A name that cannot be imported is the policy's fault and is shown."""
    with pytest.raises(PolicyError, match="There is no"):
        kept(block, preparation=prepared(slicer=hook))


def test_slices_by_code(kept, block):
    """A callable over the inputs names slices, before they are redacted."""
    path = kept(block, preparation=prepared(slicer=f"{__name__}:lengths", outputs_only=True))

    assert read_traffic_sample(path).data.slices["sum"].tolist() == ["small", "large", "large"]


def test_slices_by_request_parameter(kept, block_of):
    """Parameters behind the id become slices if asked for; no other parameter is written."""
    blocks = [
        block_of(request_ids=np.array(["a?tier=gold&day=monday"])),
        block_of(request_ids=np.array(["b?day=a%20b"])),
        block_of(request_ids=np.array(["c"])),
    ]

    path = kept(*blocks, preparation=prepared(slice_parameters=("tier",)))
    sample = read_traffic_sample(path)

    assert {name: column.tolist() for name, column in sample.data.slices.items()} == {
        "tier": ["gold", "", ""]
    }
    assert sample.request_ids.tolist() == ["a", "b", "c"]
    assert sample_info(path).requests == 3
