"""Parts of the data that nobody named."""

import numpy as np
import pytest

from enginegate.data import DataSet
from enginegate.errors import DataError, PolicyError
from validation.agreement import parts_of, traits_of


@pytest.fixture
def texts():
    """Four sequences of 1, 2, 3 and 9 tokens."""
    mask = np.arange(9)[None, :] < np.array([1, 2, 3, 9])[:, None]
    inputs = {"input_ids": np.full((4, 9), 5), "attention_mask": mask.astype(np.int64)}
    return DataSet("texts.npz", inputs, None, np.array(list("abcd")), {})


def test_length(texts):
    """Sequences are counted by their mask and cut at powers of two."""
    traits = traits_of(("length",), texts, None)

    assert traits["length"].tolist() == [1, 2, 3, 9]
    assert parts_of(traits, ())["length"].tolist() == ["up to 1", "up to 2", "up to 4", "up to 16"]


def test_confidence():
    """The probability of FP32's top class, cut at a half, nine tenths and 99 in a hundred."""
    margins = np.log([[0.4, 0.3, 0.3], [0.6, 0.3, 0.1], [0.95, 0.04, 0.01], [0.998, 1e-3, 1e-3]])
    data = DataSet("e", {}, None, np.array(list("abcd")), {})

    traits = traits_of(("confidence",), data, margins)

    assert traits["confidence"] == pytest.approx([0.4, 0.6, 0.95, 0.998])
    assert parts_of(traits, ())["confidence"].tolist() == [
        "below 0.5",
        "0.5 to 0.9",
        "0.9 to 0.99",
        "0.99 and up",
    ]


def test_constant_norm_is_one_part():
    """Where all inputs are alike there is nothing to cut."""
    data = DataSet("e", {"x": np.ones((8, 2), np.float32)}, None, np.arange(8).astype(str), {})

    parts = parts_of(traits_of(("input_norm",), data, None), ())

    assert len(set(parts["input_norm"])) == 1


def test_unavailable_derived_slice_is_refused(texts):
    """Confidence needs classes, and a name that the data uses is not taken twice."""
    with pytest.raises(PolicyError, match="no classes"):
        traits_of(("confidence",), texts, None)
    with pytest.raises(DataError, match="slice columns"):
        parts_of(traits_of(("length",), texts, None), ["length"])
