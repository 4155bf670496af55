"""Opens a model for the GPU in a process that loads no CUDA library: ``gpu_hidden.py MODEL.onnx``.

ONNX Runtime then answers on the CPU, correctly and slowly, and says nothing. PyTorch must not be
imported here: it brings the libraries along.
"""

import json
import sys
from pathlib import Path

from enginegate.candidate import Precision
from enginegate.engines.onnxruntime import session as sessions

_ASKED = "CUDAExecutionProvider"


def main() -> None:
    sessions.load_cuda_libraries = lambda: None  # type: ignore[assignment]
    opened = sessions.open_session(Path(sys.argv[1]), Precision.FP32, "cuda", inspect=True)
    answer = {"asked": _ASKED, "got": opened.provider, "fired": opened.provider != _ASKED}
    print(json.dumps(answer | {"providers": opened.session.get_providers()}))


if __name__ == "__main__":
    main()
