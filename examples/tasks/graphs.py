"""Small ONNX graphs with weights that are computed, not trained: random features and least squares.

Nothing is downloaded, and every call gives the same bytes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

Floats = NDArray[np.float32]
_RIDGE = 1e-2  # trades fit for weights that int8 can hold; chosen by looking at these models
_TYPES = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}


def model_of(
    nodes: Sequence[NodeProto],
    weights: dict[str, NDArray[Any]],
    inputs: dict[str, tuple[str, Sequence[Any]]],
    outputs: dict[str, tuple[str, Sequence[Any]]],
) -> ModelProto:
    """A checked model of any batch size.

    Args:
        inputs: by name, dtype and shape without the batch.
        outputs: the same.
    """

    def values(specs: dict[str, tuple[str, Sequence[Any]]]) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(name, _TYPES[dtype], ["batch", *shape])
            for name, (dtype, shape) in specs.items()
        ]

    constants = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(list(nodes), "example", values(inputs), values(outputs), constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.checker.check_model(model)
    return model


def random_layer(rng: np.random.Generator, inputs: int, hidden: int) -> tuple[Floats, Floats]:
    """Weights ``(inputs, hidden)`` and biases of a layer that is not trained."""
    weights = rng.normal(0.0, inputs**-0.5, (inputs, hidden))
    return weights.astype(np.float32), rng.uniform(-0.5, 0.5, hidden).astype(np.float32)


def relu_features(rows: NDArray[Any], layer: tuple[Floats, Floats]) -> Floats:
    """What the layer gives, shape ``(N, hidden)``."""
    return np.maximum(rows.astype(np.float32) @ layer[0] + layer[1], 0.0)


def fit(features: Floats, targets: NDArray[Any]) -> tuple[Floats, Floats]:
    """Least squares: weights ``(hidden, targets)`` and biases."""
    wide = np.column_stack([features, np.ones(len(features))]).astype(np.float64)
    square = wide.T @ wide + _RIDGE * len(wide) * np.eye(wide.shape[1]) / wide.shape[1]
    found = np.linalg.solve(square, wide.T @ targets.astype(np.float64))
    return found[:-1].astype(np.float32), found[-1].astype(np.float32)


def gemm(name: str, source: str, output: str) -> NodeProto:
    """A fully connected layer whose weights are called ``NAME.weight`` and ``NAME.bias``."""
    return helper.make_node("Gemm", [source, f"{name}.weight", f"{name}.bias"], [output], name)


def perceptron(
    layer: tuple[Floats, Floats], heads: dict[str, tuple[Floats, Floats]], inputs: int
) -> ModelProto:
    """One hidden layer, and an output for each head."""
    nodes = [
        gemm("hidden", "features", "summed"),
        helper.make_node("Relu", ["summed"], ["active"], "active"),
        *(gemm(name, "active", name) for name in heads),
    ]
    weights: dict[str, NDArray[Any]] = {"hidden.weight": layer[0], "hidden.bias": layer[1]}
    for name, (weight, bias) in heads.items():
        weights |= {f"{name}.weight": weight, f"{name}.bias": bias}
    outputs = {name: ("float32", [weight.shape[1]]) for name, (weight, _) in heads.items()}
    return model_of(nodes, weights, {"features": ("float32", [inputs])}, outputs)
