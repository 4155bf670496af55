"""A plan's library and version are in its first bytes."""

import pytest

from enginegate.engines import plan_info
from enginegate.errors import ModelError

RTX = b"vtrt" + bytes(20) + bytes([1, 7, 1, 116])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(RTX, "tensorrt_rtx 1.7.1.116", id="rtx"),
        pytest.param(b"ftrt" + bytes(20) + bytes([11, 4, 0, 106]), "tensorrt 11.4.0.106", id="trt"),
    ],
)
def test_version_is_read(tmp_path, content, expected):
    """Both libraries' headers are known."""
    (tmp_path / "model.plan").write_bytes(content + b"the rest")

    assert plan_info(tmp_path / "model.plan") == expected


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(RTX[:27], id="cut"),
        pytest.param(b"onnx" + RTX[4:], id="other"),
        pytest.param(RTX[:4] + b"\x01" + RTX[5:], id="newer-layout"),
    ],
)
def test_other_bytes_are_refused(tmp_path, content):
    """What is not a plan of a known layout is an error that shows how it begins."""
    (tmp_path / "model.plan").write_bytes(content)

    with pytest.raises(ModelError, match=r"model\.plan is not a TensorRT plan \(it begins with"):
        plan_info(tmp_path / "model.plan")


def test_missing_file_is_named(tmp_path):
    """A plan that is not there is an error with its path."""
    with pytest.raises(ModelError, match="Cannot read the plan"):
        plan_info(tmp_path / "model.plan")
