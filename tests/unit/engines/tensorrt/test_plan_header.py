"""A plan's library and version are in its first bytes."""

import pytest

from enginegate.engines import check_plan, plan_info
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


def full_plan(folder, *version):
    path = folder / "model.plan"
    path.write_bytes(b"ftrt" + bytes(20) + bytes(version) + b"the rest")
    return path


def test_the_servers_own_version_is_accepted(tmp_path):
    """A plan of the very version that the server has will load."""
    assert check_plan(full_plan(tmp_path, 11, 0, 0, 114), "11.0.0.114") == "tensorrt 11.0.0.114"


@pytest.mark.parametrize(
    ("server", "message"),
    [
        pytest.param(
            "11.0.0.114",
            r"TensorRT 10\.16\.1\.11; the server has 11\.0\.0\.114.*in the 26\.06-py3 container.*"
            r"from the 26\.05-py3 container",
            id="newer-server",
        ),
        pytest.param("10.16.1.12", r"in the 26\.03-py3 container", id="other-build"),
        pytest.param("12.1.0.3", r"the container that carries TensorRT 12\.1\.0\.3", id="unknown"),
        pytest.param("11.0", "not a TensorRT version of four parts", id="short"),
    ],
)
def test_another_version_names_both_and_the_container(tmp_path, server, message):
    """A server refuses plans of other versions; the error says where to build instead."""
    plan = full_plan(tmp_path, 10, 16, 1, 11)

    with pytest.raises(ModelError, match=message):
        check_plan(plan, server)


@pytest.mark.parametrize(("server", "loads"), [("11.1.0.106", True), ("10.14.1.48", False)])
def test_compatible_plans_load_forward_only(tmp_path, server, loads):
    """A version-compatible plan loads in a newer TensorRT, never in an older one."""
    plan = full_plan(tmp_path, 11, 0, 0, 114)

    if loads:
        assert check_plan(plan, server, version_compatible=True) == "tensorrt 11.0.0.114"
    else:
        with pytest.raises(ModelError, match="will not load it"):
            check_plan(plan, server, version_compatible=True)


def test_rtx_plans_are_for_no_server(tmp_path):
    """Triton's backend does not load plans of TensorRT-RTX, whatever their version."""
    (tmp_path / "model.plan").write_bytes(RTX)

    with pytest.raises(ModelError, match=r"tensorrt_rtx 1\.7\.1\.116; Triton's.*full TensorRT"):
        check_plan(tmp_path / "model.plan", "1.7.1.116")
