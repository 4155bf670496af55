"""More than one ONNX file may hold, shown with a lowered limit: weights go into a second file."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from enginegate.candidate import Candidate
from enginegate.engines import build_engine, open_engine, open_onnx, plan_engine, serving
from enginegate.errors import ModelError, TamperedError
from enginegate.policy import read_policy
from enginegate.sources import read_onnx_model

pytestmark = pytest.mark.xdist_group("sources")
ROOT = Path(__file__).parents[3]


def test_weights_go_beside_the_file(cnn, export, beside, samples, tmp_path):
    """The store keeps them in a second file, and the model answers as before."""
    large = export(f"file:{beside}", tmp_path / "onnx", one_file_bytes=500)

    assert set(large.value.external) == {"model.onnx.data"}
    assert (large.folder / "model.onnx").stat().st_size < cnn.value.file.size_bytes
    with (
        open_onnx(cnn.folder / "model.onnx") as small,
        open_onnx(large.folder / "model.onnx") as model,
    ):
        np.testing.assert_array_equal(
            model.run(dict(samples.inputs))["output"], small.run(dict(samples.inputs))["output"]
        )


def test_digest_of_the_file_stands_for_the_weights(export, beside, tmp_path):
    """The .onnx file names the sha256 of its data, so other weights are another digest."""
    large = export(f"file:{beside}", tmp_path / "onnx", one_file_bytes=500)
    notes = onnx.load(large.folder / "model.onnx", load_external_data=False).metadata_props

    assert {note.value for note in notes} == {large.value.external["model.onnx.data"].sha256}


def test_changed_weights_are_noticed(export, beside, tmp_path):
    """The data file is checked wherever the model is opened."""
    large = export(f"file:{beside}", tmp_path / "onnx", one_file_bytes=500)
    data = large.folder / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-1] + b"x")

    with pytest.raises(TamperedError, match=r"model\.onnx\.data is not the file"):
        read_onnx_model(large.folder)


def test_nan_in_them_is_found(export, beside, set_weight, tmp_path):
    """Weights that stay outside are checked like the others."""
    set_weight(np.nan)

    with pytest.raises(ModelError, match=r"holds 1 NaN or Inf"):
        export(f"file:{beside}", tmp_path / "onnx", one_file_bytes=500)


def test_engine_keeps_them_beside_it(export, beside, samples, tmp_path):
    """An FP32 engine has its own copy, serves it, and notices a change; int8 holds its own."""
    large = export(f"file:{beside}", tmp_path / "onnx", one_file_bytes=500)
    policy = read_policy(ROOT / "policies" / "digits.toml")
    plans = [
        plan_engine(large, Candidate.parse(name), tables=policy.engine_tables, calibration=samples)
        for name in ("onnxruntime-fp32", "onnxruntime-int8")
    ]

    exact, quantised = (build_engine(plan, tmp_path / "engines") for plan in plans)

    assert set(serving(exact.value, exact.folder).files) >= {"model.onnx", "model.onnx.data"}
    assert (set(exact.value.external), quantised.value.external) == ({"model.onnx.data"}, {})
    with open_engine(exact.value, exact.folder) as engine:
        assert engine.run(dict(samples.inputs))["output"].shape == (64, 10)
    (exact.folder / "model.onnx.data").write_bytes(b"other")
    with pytest.raises(TamperedError, match=r"model\.onnx\.data"):
        serving(exact.value, exact.folder)
