"""Which types TensorRT's parser gave the layers: the proof that does not need a GPU."""

from collections import Counter
from typing import Any

from enginegate.engines.tensorrt.job import BuildReport

_WORDS = {"FLOAT": "fp32", "HALF": "fp16", "BF16": "bf16", "INT8": "int8", "FP8": "fp8"}
_CARRYING = frozenset({"SHUFFLE", "IDENTITY", "CAST"})  # between a Dequantize and its layer


def audit(trt: Any, network: Any) -> BuildReport:
    """Layers that multiply, by the type they compute in, and Quantize layers by theirs.

    A layer computes in int8 or fp8 when both operands come from Dequantize layers of that type.
    """
    kinds = trt.LayerType
    multiplying = {kinds.CONVOLUTION, kinds.DECONVOLUTION, kinds.MATRIX_MULTIPLY}
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    makers = {each.get_output(n).name: each for each in layers for n in range(each.num_outputs)}
    weighted: Counter[str] = Counter()
    quantise: Counter[str] = Counter()
    for layer in layers:
        if layer.type in multiplying:
            weighted[_computes_in(layer, makers)] += 1
        if layer.type == kinds.QUANTIZE:
            quantise[_word(layer.get_output(0))] += 1
    return BuildReport(weighted=dict(weighted), quantise=dict(quantise))


def _computes_in(layer: Any, makers: dict[str, Any]) -> str:
    operands = [layer.get_input(index) for index in range(min(layer.num_inputs, 2))]
    sources = [_dequantised_from(operand, makers) for operand in operands]
    narrow = set(sources)
    if len(sources) > 1 and len(narrow) == 1 and sources[0]:
        return sources[0]
    return _word(layer.get_output(0))


def _dequantised_from(tensor: Any, makers: dict[str, Any]) -> str:
    """The type that a tensor had before it was dequantised, or nothing if it was not."""
    maker = makers.get(tensor.name)
    while maker is not None and maker.type.name in _CARRYING:
        maker = makers.get(maker.get_input(0).name)
    if maker is None or maker.type.name != "DEQUANTIZE":
        return ""
    return _word(maker.get_input(0))


def _word(tensor: Any) -> str:
    return _WORDS.get(tensor.dtype.name, "other")
