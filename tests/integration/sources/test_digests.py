"""The same source has the same digest, wherever and whenever it is exported."""

import json
import os
import subprocess
import sys

import pytest

from enginegate.data import write_data

pytestmark = pytest.mark.xdist_group("sources")

EXPORT_ALL = """
import json, sys
from pathlib import Path
from enginegate.data import read_data
from enginegate.engines import open_onnx
from enginegate.policy.model_source import ModelSource
from enginegate.sources import onnx_from_source

root, tracking_uri, jobs = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
sys.path.insert(0, sys.argv[4])
for uri, data in jobs:
    kept = onnx_from_source(
        ModelSource(uri=uri, allow_code=True), read_data(root / data),
        onnx_root=root / "onnx", tracking_uri=tracking_uri, open_onnx=open_onnx,
        one_file_bytes=2**30,
    )
    print(kept.reused, kept.value.file.sha256)
"""


@pytest.mark.usefixtures("importable")
def test_every_form_has_the_same_digest_in_another_process(  # noqa: PLR0913
    registry, export, encoders, models, program, classifier, samples, tokens, rows, store, tmp_path
):
    """Hash seed, process and folder decide nothing, whatever the form; and nothing is printed."""
    jobs = [
        ("models:/cnn/1", samples),
        (f"file:{program()}", tokens),
        (f"hf:{encoders}/classifier", tokens),
        ("python:toy_models:tokens", tokens),
        (registry.log("sklearn", classifier(), name="again"), rows),
    ]
    here = [export(uri, store / "onnx", data=data, allow_code=True).value for uri, data in jobs]
    for data in (samples, tokens, rows):
        write_data(data, tmp_path / data.origin)
    named = json.dumps([(uri, data.origin) for uri, data in jobs])

    said = subprocess.run(
        [sys.executable, "-c", EXPORT_ALL, tmp_path, registry.tracking_uri, named, models],
        env=os.environ | {"PYTHONHASHSEED": "4711", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )

    assert said.stdout.split() == [word for onnx in here for word in ("False", onnx.file.sha256)]
    assert said.stderr == ""
