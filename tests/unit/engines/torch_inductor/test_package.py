"""What a package's generated source says, without compiling one."""

import json
from zipfile import ZipFile

import pytest

from enginegate.engines.torch_inductor.package import read_package, why_not_frozen
from enginegate.errors import ModelError

# As torch 2.11 generates it for a GPU, shortened.
SOURCE = """
    constants_info_[0].name = "constant_l_bias";
    constants_info_[0].dtype = cached_torch_dtype_float16;
    constants_info_[0].data_size = 16;
    constants_info_[0].original_fqn = "inner.l.bias";
    constants_info_[1].name = "_frozen_param4";
    constants_info_[1].dtype = cached_torch_dtype_float16;
    constants_info_[1].data_size = 256;
    constants_info_[1].original_fqn = "_frozen_param4";
void AOTInductorModel::run_impl(
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(2, a, b, cached_torch_dtype_float16, cached_torch_device_type_cuda, this->device_idx_, &buf4_handle));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(2, a, b, cached_torch_dtype_float32, cached_torch_device_type_cuda, this->device_idx_, &buf5_handle));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_addmm_out(buf4, constant_l_bias, arg0_1, _frozen_param4, 1L, 1L));
    call_triton_tem_fused_mm_3(buf5, buf4, this->device_idx_, stream);
"""  # noqa: E501


def package(path, source=SOURCE):
    with ZipFile(path, "w") as archive:
        archive.writestr("model/data/aotinductor/model/a.wrapper.cpp", source)
        stamp = {"AOTI_DEVICE_KEY": "cuda", "enginegate_key": "k"}
        archive.writestr("model/data/aotinductor/model/a.wrapper_metadata.json", json.dumps(stamp))
    return path


def test_kernels_count_by_the_widest_type_they_touch(tmp_path):
    """A product of float16 that writes float32 counts as float32."""
    found = read_package(package(tmp_path / "a.pt2"))

    assert found.multiplications == {"fp16": 1, "fp32": 1}
    assert found.weights == {"fp16": 136}
    assert found.buffers == {"fp16": 1, "fp32": 1}
    assert (found.frozen, found.original) == (1, ("inner.l.bias",))
    assert found.stamp["enginegate_key"] == "k"


def test_statistics_that_are_left_show_that_batchnorm_was_not_folded(tmp_path):
    """Even where other constants are frozen."""
    found = read_package(package(tmp_path / "a.pt2", SOURCE.replace("l.bias", "b.running_var")))

    why = why_not_frozen(found, weights=1, statistics=frozenset({"inner.b.running_var"}))

    assert "BatchNorm was not folded" in why
    assert "inner.b.running_var is still" in why


def test_program_without_weights_needs_no_frozen_constant(tmp_path):
    """There is nothing that freezing could do."""
    found = read_package(package(tmp_path / "a.pt2", SOURCE.replace("_frozen_param", "constant_")))

    assert why_not_frozen(found, weights=0, statistics=frozenset()) is None
    assert "none of its 2 constants is frozen" in why_not_frozen(
        found, weights=1, statistics=frozenset()
    )


def test_file_that_is_no_package_is_refused(tmp_path):
    """By name, and with the next step."""
    (tmp_path / "a.pt2").write_bytes(b"text")
    with ZipFile(tmp_path / "b.pt2", "w") as archive:
        archive.writestr("other", "")

    for name in ("a.pt2", "b.pt2"):
        with pytest.raises(ModelError, match=rf"{name} is no AOTInductor package.*Build it again"):
            read_package(tmp_path / name)
