"""The engine kinds there are."""

from collections.abc import Callable

from enginegate.candidate import Engine, EngineKind
from enginegate.engines.onnxruntime import engine as onnxruntime
from enginegate.engines.protocol import Kind
from enginegate.engines.tensorrt import engine as tensorrt
from enginegate.serving import BackendSettings

# Triton's own backend for each kind, and the name it expects the engine's file to have.
NATIVE: dict[EngineKind, tuple[str, str]] = {
    EngineKind.ONNXRUNTIME: ("onnxruntime", "model.onnx"),
    EngineKind.TENSORRT: ("tensorrt", "model.plan"),
}
# What that backend is told of an engine; where it is the kind's usual one, `Kind.serving` says it.
NATIVE_SETTINGS: dict[EngineKind, Callable[[Engine], BackendSettings]] = {
    EngineKind.ONNXRUNTIME: onnxruntime.native_settings,
}
KINDS: dict[EngineKind, Kind] = {
    EngineKind.ONNXRUNTIME: onnxruntime,
    EngineKind.TENSORRT: tensorrt,
}
