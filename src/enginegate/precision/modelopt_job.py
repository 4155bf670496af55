"""One NVIDIA ModelOpt conversion, run as a script by an interpreter that has ModelOpt.

It imports nothing of this project, because that interpreter may not have it. Usage: PYTHON
modelopt_job.py JOB.json. ModelOpt changes ONNX Runtime for its whole process, hence this one.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> None:
    """Convert ``source`` into ``target``.

    Job: source, target, data (.npz by input name), precision, method, batch, inputs (name -> shape
    without the batch), keep (names of nodes).
    """
    exclude = [f"^{re.escape(name)}$" for name in job["keep"]]
    if job["precision"] in {"fp16", "bf16"}:
        import onnx  # noqa: PLC0415
        from modelopt.onnx.autocast import (  # type: ignore[import-not-found]  # noqa: PLC0415
            convert_to_mixed_precision,
        )

        model = convert_to_mixed_precision(
            job["source"],
            low_precision_type=job["precision"],
            keep_io_types=True,
            calibration_data=job["data"],
            nodes_to_exclude=exclude,
        )
        onnx.save(model, job["target"])
        return
    import numpy as np  # noqa: PLC0415
    from modelopt.onnx.quantization import (  # type: ignore[import-not-found]  # noqa: PLC0415
        quantize,
    )

    with np.load(job["data"], allow_pickle=False) as archive:
        data = {name: archive[name] for name in archive.files}
    quantize(
        job["source"],
        quantize_mode=job["precision"],
        calibration_data=data,
        calibration_method=job["method"],
        calibration_shapes=",".join(
            f"{name}:{'x'.join(map(str, (job['batch'], *shape)))}"
            for name, shape in job["inputs"].items()
        ),
        calibration_eps=["cpu"],
        high_precision_dtype="fp32",
        nodes_to_exclude=exclude,
        output_path=job["target"],
        log_level="ERROR",
    )


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
