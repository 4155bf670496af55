"""Which TensorRT wrote a plan, read from its first bytes: loading one to ask may crash.

NVIDIA's trtexec --getPlanVersionOnly reads the same bytes (samples/common/sampleEngines.cpp);
that TensorRT-RTX keeps its version at the same offset was observed.
"""

from pathlib import Path

from enginegate.errors import ModelError

_LENGTH = 28
_LIBRARIES = {b"ftrt": "tensorrt", b"vtrt": "tensorrt_rtx"}


def plan_info(path: Path) -> str:
    """Library and four-part version, for example ``tensorrt_rtx 1.7.1.116``.

    Raises:
        ModelError: the file cannot be read, or is not a plan of a known layout.
    """
    try:
        with path.open("rb") as file:
            header = file.read(_LENGTH)
    except OSError as error:
        raise ModelError(f"Cannot read the plan {path}: {error.strerror}.") from error
    library = _LIBRARIES.get(header[:4])
    if len(header) < _LENGTH or library is None or any(header[4:8]):
        raise ModelError(
            f"{path} is not a TensorRT plan (it begins with {header[:8].hex(' ') or 'nothing'}), "
            "or its layout is newer than this program knows. Build the engine again."
        )
    return f"{library} {'.'.join(str(part) for part in header[24:28])}"
