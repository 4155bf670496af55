"""The engine kinds there are."""

from enginegate.candidate import EngineKind
from enginegate.engines import onnxruntime, tensorrt
from enginegate.engines.protocol import Kind

KINDS: dict[EngineKind, Kind] = {
    EngineKind.ONNXRUNTIME: onnxruntime,
    EngineKind.TENSORRT: tensorrt,
}
