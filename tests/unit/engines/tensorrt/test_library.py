"""A probe's report as a library, and which plans are its own."""

import pytest

from enginegate.engines.tensorrt.library import TensorRtLibrary, library_of

PROBED = {
    "name": "tensorrt",
    "module": "tensorrt_bindings",
    "version": "8.6.0",
    "python": "3.11.7",
    "kernels": {"cudnn": "empty", "cublas": "here", "cublaslt": "here"},
    "members": {"ComputeCapability": []},
    "monitor": False,
    "strong": False,
}


def test_probe_describes_a_library():
    """TensorRT 8.6: flags instead of types, opset 17 at most, no progress, one placeholder."""
    found = library_of(PROBED, "/opt/trt/python")

    assert str(found) == "tensorrt 8.6.0"
    assert found.is_weakly_typed
    assert found.highest_opset == 17
    assert found.lacks_kernels
    assert not found.tells_progress


def test_rtx_tells_its_targets():
    """Its version is a small number too, but its networks are strongly typed."""
    members = {"ComputeCapability": ["NONE", "CURRENT", "SM75", "SM89"]}
    found = library_of(
        PROBED | {"name": "tensorrt_rtx", "version": "1.7.1.116", "members": members}, "python"
    )

    assert found.targets == ("sm75", "sm89")
    assert not found.is_weakly_typed
    assert found.highest_opset is None


@pytest.mark.parametrize(
    ("version", "builder", "is_own"),
    [
        pytest.param("8.6.0", "tensorrt 8.6.0.12", True, id="three-parts"),
        pytest.param("8.6.1", "tensorrt 8.6.0.12", False, id="patch"),
        pytest.param("10.13.3.9", "tensorrt 10.13.3.9", True, id="four-parts"),
        pytest.param("10.13.3.9", "tensorrt 10.13.3.8", False, id="build"),
        pytest.param("8.6.0", "tensorrt_rtx 8.6.0.12", False, id="other-library"),
    ],
)
def test_a_plan_belongs_to_the_version_that_wrote_it(version, builder, is_own):
    """The library of TensorRT 8.6 tells three of its plans' four parts."""
    library = TensorRtLibrary("python", "tensorrt", "tensorrt", version)

    assert library.wrote(builder) is is_own
