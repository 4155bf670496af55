"""What TensorRT's engine inspector says a plan computes in, layer by layer: pure.

A weakly typed build may keep layers at FP32, so its precision is read here. Layers that a compiler
fused into one region ("Myelin", "ForeignNode") are not shown one by one; of them the inspector
tells only where they begin and end.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from enginegate.errors import ModelError

_MULTIPLYING = (
    "conv",
    "gemm",
    "matrixmultiply",
    "matrix_multiply",
    "fullyconnected",
    "fully_connected",
)
_FUSED = ("myelin", "foreignnode")
# Formats as the inspector words them, e.g. "Channel major FP16 format where channel % 8 == 0".
_WORDS = (
    ("fp8", ("fp8",)),
    ("int8", ("int8",)),
    ("bf16", ("bf16", "bfloat16")),
    ("fp16", ("fp16", "half")),
    ("fp32", ("fp32", "float")),
)
_SEPARATORS = re.compile(r"\s*(?:\+|\|\|)\s*")
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class PlanLayer:
    """One layer of a plan.

    Attributes:
        name: made of the names of the ONNX nodes that it does.
        word: the type that it computes in, or ``unknown``.
        multiplies: whether it is a convolution or a matrix product.
        is_fused: whether it is a region whose layers are not shown.
        ms: time of one run, or None where it was not measured.
    """

    name: str
    word: str
    multiplies: bool
    is_fused: bool
    ms: float | None = None

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the ONNX nodes that it does, among others."""
        return tuple(part for part in _SEPARATORS.split(self.name) if part)


def plan_layers(inspected: str, layer_ms: Mapping[str, float]) -> tuple[PlanLayer, ...]:
    """The layers of the inspector's JSON, with their times.

    Args:
        inspected: what the inspector wrote for a plan that was built with detailed verbosity.
        layer_ms: by layer name; empty where nothing was measured.

    Raises:
        ModelError: it is not such JSON.
    """
    try:
        told = json.loads(inspected, strict=False)["Layers"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"TensorRT's inspector wrote no layers: {inspected[:200]!r}") from error
    return tuple(_layer(each, layer_ms) for each in told if isinstance(each, dict))


def _layer(told: Mapping[str, Any], layer_ms: Mapping[str, float]) -> PlanLayer:
    name = str(told.get("Name", ""))
    kinds = f"{told.get('LayerType', '')} {told.get('ParameterType', '')}".lower()
    is_fused = any(word in f"{kinds} {name}".lower() for word in _FUSED)
    return PlanLayer(
        name=name,
        word=computes_in(told),
        multiplies=not is_fused and any(word in kinds for word in _MULTIPLYING),
        is_fused=is_fused,
        ms=layer_ms.get(name),
    )


def computes_in(told: Mapping[str, Any]) -> str:
    """The type that one layer of the inspector computes in: of its weights, else of its input.

    A convolution with half weights multiplies halves, whatever its neighbours want; where weights
    are an input of their own, the widest input decides.
    """
    weights = told.get("Weights")
    if isinstance(weights, dict) and int(weights.get("Count", 0) or 0):
        word = _word(str(weights.get("Type", "")))
        if word != "unknown":
            return word
    inputs = told.get("Inputs") or []
    formats = (_word(str(each.get("Format/Datatype", ""))) for each in inputs if _is_told(each))
    known = {word for word in formats if word != "unknown"}
    return next((word for word, _ in reversed(_WORDS) if word in known), "unknown")


def _is_told(tensor: object) -> bool:
    return isinstance(tensor, dict)


def _word(text: str) -> str:
    lowered = text.lower()
    return next((word for word, signs in _WORDS if any(s in lowered for s in signs)), "unknown")


def node_types(layers: Iterable[PlanLayer]) -> dict[str, str]:
    """ONNX node -> the type that it computes in, of nodes in layers that are shown."""
    seen = ((node, layer) for layer in layers if layer.multiplies for node in layer.nodes)
    return {node: layer.word for node, layer in seen if layer.word != "unknown"}


def executed_types(layers: Iterable[PlanLayer]) -> dict[str, int]:
    """Layers that multiply, by the type they compute in; regions that are not shown apart."""
    counts: Counter[str] = Counter()
    for layer in layers:
        if layer.is_fused:
            counts["fused regions"] += 1
        elif layer.multiplies:
            counts[layer.word] += 1
    return dict(sorted(counts.items()))


def wider_layers(layers: tuple[PlanLayer, ...], narrow: tuple[str, ...]) -> str:
    """Which layers that multiply were kept wider than asked, and their share of the time.

    Args:
        narrow: the types that were asked for, e.g. ``("int8", "fp16")``.

    Returns:
        One sentence, or nothing where there is no such layer.
    """
    kept = [each for each in layers if each.multiplies and each.word not in narrow]
    if not kept:
        return ""
    slowest = sorted(kept, key=lambda each: -(each.ms or 0.0))
    names = ", ".join(each.name for each in slowest[:_SHOWN])
    more = f" and {len(kept) - _SHOWN} more" if len(kept) > _SHOWN else ""
    words = "+".join(sorted({each.word for each in kept}))
    total = sum(each.ms or 0.0 for each in layers)
    share = f", {sum(each.ms or 0.0 for each in kept) / total:.1%} of the time" if total else ""
    layers_word = "layer" if len(kept) == 1 else "layers"
    return f"TensorRT kept {len(kept)} {layers_word} at {words}{share}: {names}{more}."


def time_by_type(layers: Iterable[PlanLayer]) -> str:
    """Share of the time by type, e.g. ``fp16 93.1%, fused 6.9%``; empty if unmeasured."""
    spent: Counter[str] = Counter()
    for layer in layers:
        spent["fused" if layer.is_fused else layer.word] += layer.ms or 0.0  # type: ignore[assignment]
    total = sum(spent.values())
    if not total:
        return ""
    return ", ".join(f"{word} {ms / total:.1%}" for word, ms in spent.most_common() if ms)
