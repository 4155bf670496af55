import pytest

from enginegate.errors import ModelError
from enginegate.triton.codec import numpy_type, triton_type


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "float16", "float64"])
def test_types_go_there_and_back(dtype):
    """Every supported dtype has one Triton name and comes back from it."""
    assert numpy_type(triton_type(dtype)) == dtype
    assert numpy_type(f"TYPE_{triton_type(dtype)}") == dtype


@pytest.mark.parametrize("dtype", ["object", "bfloat16", "complex64", "str"])
def test_unknown_dtype(dtype):
    """A dtype that cannot be carried is refused with the list of those that can."""
    with pytest.raises(ModelError, match=rf"(?s){dtype}.*Supported: bool, uint8"):
        triton_type(dtype)


def test_unknown_triton_type():
    """Text tensors cannot be read here, and the error says so."""
    with pytest.raises(ModelError, match="TYPE_STRING cannot be read"):
        numpy_type("TYPE_STRING")
