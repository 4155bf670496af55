"""scikit-learn -> ONNX through skl2onnx; the only door to it in this room.

A classifier becomes logits: the logarithm of its probabilities, in the order of ``classes_``. Their
softmax is the probabilities again, so classifiers of every family are judged alike.
"""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

from enginegate.data import DataSet, Tensors
from enginegate.errors import DataError, ModelError
from enginegate.messages import first_line
from enginegate.sources.types import OPSET, ExportedModel, Framework, exporter_versions

_ML_OPSET = 3
LOGITS = "logits"
PREDICTION = "prediction"
_LEAST = np.float32(1e-6)  # a probability of 0 has no logarithm


def sklearn_exporter() -> str:
    """Versions that decide the exported bytes; ModelError if a library is not installed."""
    return exporter_versions("scikit-learn", {"scikit-learn": "sklearn", "skl2onnx": "sklearn"})


def onnx_from_estimator(
    estimator: Any, data: DataSet, scratch: Path, *, origin: str
) -> ExportedModel:
    """Convert for one FP32 input of shape ``(N, features)``."""
    name = _input(estimator, data, origin)
    classifier = hasattr(estimator, "classes_")
    if classifier and _is_multi_label(estimator):
        raise ModelError(
            f"{origin} ({type(estimator).__name__}) gives several labels at once, whose "
            "probabilities are no logits of classes. Convert it yourself, and name the ONNX file "
            'with task = "multi-label" and a threshold of 0.5.'
        )
    if classifier and not hasattr(estimator, "predict_proba"):
        raise ModelError(
            f"{origin} ({type(estimator).__name__}) has no predict_proba, so it gives no logits. "
            "Wrap it in CalibratedClassifierCV, or set probability=True before fitting."
        )
    model = _converted(estimator, name, data, origin)
    if classifier:
        _give_logits(model)
    else:
        before = model.graph.output[0].name
        for node in model.graph.node:
            for at, output in enumerate(node.output):
                if output == before:
                    node.output[at] = PREDICTION
        model.graph.output[0].name = PREDICTION
    path = scratch / "exported.onnx"
    onnx.save(model, path)
    logarithms = frozenset({LOGITS} if classifier else ())
    return ExportedModel(path, _framework(estimator, name, classifier=classifier), logarithms)


def _is_multi_label(estimator: Any) -> bool:
    """Whether it was fitted on several labels a sample: a list of classes for each, or a flag."""
    last = estimator[-1] if hasattr(estimator, "steps") else estimator
    several = isinstance(last.classes_, list) or getattr(last, "multilabel_", False)
    binarizer = getattr(last, "_label_binarizer", None)  # of MLPClassifier, which has no flag
    return bool(several or getattr(binarizer, "y_type_", "").startswith("multilabel"))


def _input(estimator: Any, data: DataSet, origin: str) -> str:
    features = getattr(estimator, "n_features_in_", None)
    kinds = {name: f"{array.dtype}{array.shape[1:]}" for name, array in data.inputs.items()}
    wanted = f"float32({features},)"
    if list(kinds.values()) != [wanted]:
        raise DataError(
            f"{data.origin} holds {kinds} a sample; {origin} takes one input, {wanted}, under any "
            "name."
        )
    return next(iter(kinds))


def _converted(estimator: Any, name: str, data: DataSet, origin: str) -> ModelProto:
    from skl2onnx import convert_sklearn  # type: ignore[import-untyped]  # noqa: PLC0415
    from skl2onnx.common.data_types import (  # type: ignore[import-untyped]  # noqa: PLC0415
        FloatTensorType,
    )

    kind = FloatTensorType([None, data.inputs[name].shape[1]])
    options = {id(estimator): {"zipmap": False}} if hasattr(estimator, "classes_") else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: ModelProto = convert_sklearn(
                estimator,
                name="sklearn",  # else it is random
                initial_types=[(name, kind)],
                options=options,
                target_opset={"": OPSET, "ai.onnx.ml": _ML_OPSET},
            )
    except Exception as error:  # skl2onnx's errors share no base class of its own
        raise ModelError(
            f"{origin} cannot become ONNX: {type(error).__name__}: {first_line(error)}\n"
            "Every step of a pipeline must be one that skl2onnx supports."
        ) from error
    return model


def _give_logits(model: ModelProto) -> None:
    """Drop the label, and follow the probabilities with Max and Log."""
    graph, probabilities = model.graph, model.graph.output[1]
    classes = probabilities.type.tensor_type.shape.dim[1].dim_value
    graph.initializer.append(numpy_helper.from_array(np.asarray(_LEAST), "least_probability"))
    graph.node.append(
        helper.make_node("Max", [probabilities.name, "least_probability"], ["clipped"], "clip")
    )
    graph.node.append(helper.make_node("Log", ["clipped"], [LOGITS], "logarithm"))
    shape = [None, classes or None]
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, shape))


def _framework(estimator: Any, name: str, *, classifier: bool) -> Framework:
    def run(inputs: Tensors) -> Tensors:
        if not classifier:
            predicted = np.asarray(estimator.predict(inputs[name]))
            return {PREDICTION: predicted.reshape(len(predicted), -1)}
        probabilities = np.asarray(estimator.predict_proba(inputs[name]), np.float32)
        return {LOGITS: np.log(np.maximum(probabilities, _LEAST))}

    return run
