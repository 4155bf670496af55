"""What the engine inspector of TensorRT says a plan computes in."""

import json

import pytest

from enginegate.engines.tensorrt.layers import (
    computes_in,
    executed_types,
    node_types,
    plan_layers,
    time_by_type,
    wider_layers,
)
from enginegate.errors import ModelError

HALF_CHANNELS = "Channel major FP16 format where channel % 8 == 0"


def layer(name, kind, fmt="Row major linear FP32", weights="", parameters=""):
    """As TensorRT 8.6 writes it with detailed verbosity."""
    told = {
        "Name": name,
        "LayerType": kind,
        "Inputs": [{"Name": "in", "Dimensions": [1, 8], "Format/Datatype": fmt}],
        "Outputs": [],
        "ParameterType": parameters or kind,
        "TacticName": "sm80_xmma",
    }
    return told | ({"Weights": {"Type": weights, "Count": 9408}} if weights else {})


CONV = layer("conv1 + conv1.relu", "CaskConvolution", HALF_CHANNELS, "Half", "Convolution")
KEPT = layer("fc", "CaskGemmConvolution", "Row major linear FP32", "Float", "Convolution")
POOL = layer("pool", "CaskPooling", HALF_CHANNELS, parameters="Pooling")
FUSED = layer("{ForeignNode[embed...head]}", "Myelin", parameters="Myelin")


def layers(*told, **ms):
    return plan_layers(json.dumps({"Layers": told, "Bindings": ["in"]}), ms)


@pytest.mark.parametrize(
    ("told", "word"),
    [
        pytest.param(CONV, "fp16", id="half-weights"),
        pytest.param(KEPT, "fp32", id="float-weights"),
        pytest.param(POOL, "fp16", id="format"),
        pytest.param(
            layer(
                "q", "CaskConvolution", "Thirty-two wide channel vectorized row major Int8 format"
            ),
            "int8",
            id="int8-format",
        ),
        pytest.param(
            layer("c", "CaskConvolution", "Row major linear FP32", "Int8", "Convolution"),
            "int8",
            id="weights-before-format",
        ),
        pytest.param({"Name": "x", "LayerType": "Constant", "Inputs": []}, "unknown", id="none"),
    ],
)
def test_type_is_that_of_the_weights_else_of_the_input(told, word):
    """The formats are TensorRT's own words."""
    assert computes_in(told) == word


def test_widest_input_decides_without_weights():
    """A product of two activations computes in the wider one's type."""
    told = layer("m", "MatrixMultiply", HALF_CHANNELS)
    told["Inputs"].append({"Format/Datatype": "Row major linear FP32"})

    assert computes_in(told) == "fp32"


def test_layers_that_multiply_are_counted_by_type():
    """Pooling is none of them; a region whose inside is not shown is counted apart."""
    assert executed_types(layers(CONV, KEPT, POOL, FUSED)) == {
        "fp16": 1,
        "fp32": 1,
        "fused regions": 1,
    }


def test_nodes_get_the_type_of_the_layer_that_does_them():
    """A layer's name is made of its nodes' names."""
    merged = layer("conv2 || conv3", "CaskConvolution", HALF_CHANNELS, "Half", "Convolution")

    assert node_types(layers(CONV, merged, KEPT, FUSED)) == {
        "conv1": "fp16",
        "conv1.relu": "fp16",
        "conv2": "fp16",
        "conv3": "fp16",
        "fc": "fp32",
    }


def test_layers_kept_wider_are_named_with_their_share():
    """An FP16 plan with FP32 layers says which, and how much of the time they take."""
    found = layers(CONV, KEPT, POOL, **{"conv1 + conv1.relu": 3.0, "fc": 0.8, "pool": 0.2})

    assert wider_layers(found, ("fp16",)) == "TensorRT kept 1 layer at fp32, 20.0% of the time: fc."
    assert time_by_type(found) == "fp16 80.0%, fp32 20.0%"


def test_nothing_is_said_where_nothing_was_kept_or_measured():
    """No sentence without a layer; no share without a time."""
    assert wider_layers(layers(CONV, POOL), ("fp16",)) == ""
    assert wider_layers(layers(KEPT), ("fp16",)) == "TensorRT kept 1 layer at fp32: fc."
    assert time_by_type(layers(CONV)) == ""


@pytest.mark.parametrize("text", ["", "[]", "{}", "Layer(conv1)"])
def test_other_text_is_refused(text):
    """What is not the inspector's JSON is an error, never an empty proof."""
    with pytest.raises(ModelError, match="inspector wrote no layers"):
        plan_layers(text, {})
