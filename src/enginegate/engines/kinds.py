"""The engine kinds there are."""

from enginegate.candidate import EngineKind
from enginegate.engines import onnxruntime, tensorrt
from enginegate.engines.protocol import Kind

# Triton's own backend for each kind, and the name it expects the engine's file to have.
NATIVE: dict[EngineKind, tuple[str, str]] = {
    EngineKind.ONNXRUNTIME: ("onnxruntime", "model.onnx"),
    EngineKind.TENSORRT: ("tensorrt", "model.plan"),
}
KINDS: dict[EngineKind, Kind] = {
    EngineKind.ONNXRUNTIME: onnxruntime,
    EngineKind.TENSORRT: tensorrt,
}
