"""Code and files outside the model's folder are refused with file, setting and value."""

import re

import pytest

from enginegate.errors import ModelError
from enginegate.sources.untrusted import auto_map_classes, check_config, check_inside

KERNEL = "someone/attention:kernel"


@pytest.mark.parametrize(
    ("config", "key", "value", "instead"),
    [
        pytest.param(
            {"attn_implementation": KERNEL}, "attn_implementation", KERNEL, "'sdpa'", id="attention"
        ),
        pytest.param(
            {"_attn_implementation": "someone/attention"},
            "_attn_implementation",
            "someone/attention",
            "'eager'",
            id="private",
        ),
        pytest.param(
            {"_attn_implementation_internal": f"paged|{KERNEL}"},
            "_attn_implementation_internal",
            "paged",
            "'eager'",
            id="internal",
        ),
        pytest.param(
            {"attn_implementation": {"": "eager", "text_config": KERNEL}},
            "attn_implementation",
            KERNEL,
            "'eager'",
            id="by-part",
        ),
        pytest.param(
            {"text_config": {"attn_implementation": KERNEL}},
            "text_config.attn_implementation",
            KERNEL,
            "'eager'",
            id="text",
        ),
        pytest.param(
            {"parts": [{"vision_config": {"_attn_implementation": KERNEL}}]},
            "parts.0.vision_config._attn_implementation",
            KERNEL,
            "'eager'",
            id="deep",
        ),
        pytest.param(
            {"attn_implementation": "flash_attention_2"},
            "attn_implementation",
            "flash_attention_2",
            "'eager'",
            id="package",
        ),
        pytest.param(
            {"experts_implementation": KERNEL},
            "experts_implementation",
            KERNEL,
            "'grouped_mm'",
            id="experts",
        ),
        pytest.param(
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config",
            "gptq",
            "Give the FP32 model",
            id="quantised",
        ),
        pytest.param({"use_kernels": True}, "use_kernels", "True", "Remove", id="kernels"),
        pytest.param(
            {"rms_norm_kernel": KERNEL}, "rms_norm_kernel", KERNEL, "Remove", id="one-kernel"
        ),
        pytest.param(
            {"auto_map": {"AutoModel": "someone/code--net.Net"}},
            "auto_map",
            "someone/code--net.Net",
            "Copy that code",
            id="code-elsewhere",
        ),
    ],
)
def test_code_of_elsewhere_is_refused(config, key, value, instead):
    """Whatever its spelling and wherever it stands, a kernel or code of a hub is named."""
    with pytest.raises(ModelError) as caught:
        check_config({"model_type": "bert", **config}, uri="hf:folder", file="config.json")

    told = str(caught.value)
    assert f"hf:folder was not opened: its config.json sets {key} to " in told
    assert value in told
    assert instead in told


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"attn_implementation": "eager"}, id="eager"),
        pytest.param({"_attn_implementation": "sdpa", "text_config": {}}, id="sdpa"),
        pytest.param({"attn_implementation": {"text_config": "sdpa"}}, id="by-part"),
        pytest.param({"attn_implementation": None, "quantization_config": None}, id="nothing"),
        pytest.param({"experts_implementation": "grouped_mm"}, id="experts"),
        pytest.param({"_name_or_path": "sentence-transformers/all-MiniLM-L6-v2"}, id="origin"),
        pytest.param({"conv_kernel": [10, 3], "kernel_size": 3, "simple_mlp": True}, id="sizes"),
        pytest.param({"auto_map": {"AutoModel": "net.Net"}}, id="own-code"),
    ],
)
def test_ordinary_settings_pass(config):
    """Implementations of transformers itself, sizes of convolutions, a model's first name."""
    check_config(config, uri="hf:folder", file="config.json")


def test_code_is_found_at_any_depth():
    """Classes that nested settings name count like those at the top."""
    config = {"auto_map": {"A": "a.A"}, "text_config": {"auto_map": {"B": ["b.B", None]}}}

    assert auto_map_classes(config) == ("a.A", "b.B")
    assert auto_map_classes({"text_config": {}}) == ()


@pytest.mark.parametrize(
    ("flavors", "key"),
    [
        pytest.param({"onnx": {"data": "../.."}}, "onnx.data", id="data"),
        pytest.param({"pytorch": {"model_data": "/etc"}}, "pytorch.model_data", id="absolute"),
        pytest.param({"pytorch": {"code": "../x"}}, "pytorch.code", id="code"),
        pytest.param({"sklearn": {"pickled_model": "a/../../b"}}, "sklearn.pickled_model", id="in"),
        pytest.param(
            {"python_function": {"env": {"conda": "../conda.yaml"}}},
            "python_function.env.conda",
            id="environment",
        ),
        pytest.param(
            {"pytorch": {"extra_files": [{"path": "../secret"}]}},
            "pytorch.extra_files.0.path",
            id="list",
        ),
        pytest.param({"onnx": {"data": "link/model.onnx"}}, "onnx.data", id="symbolic-link"),
        pytest.param({"onnx": {"data": "model\0.onnx"}}, "onnx.data", id="null-byte"),
    ],
)
def test_path_out_of_the_folder_is_refused(tmp_path, flavors, key):
    """Up, absolute, or through a symbolic link: the setting and its value are named."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)

    with pytest.raises(
        ModelError, match=rf"its MLmodel file sets {re.escape(key)} to '.*leads out of the model's"
    ):
        check_inside(flavors, folder, uri="models:/m/1", file="MLmodel")


def test_paths_in_the_folder_pass(tmp_path):
    """Paths as MLflow itself writes them."""
    flavors = {
        "python_function": {
            "data": "model.onnx",
            "env": {"conda": "conda.yaml", "virtualenv": "python_env.yaml"},
            "loader_module": "mlflow.onnx",
        },
        "onnx": {"data": "model.onnx", "code": None, "providers": ["/anything"]},
        "pytorch": {"model_data": "data", "code": ""},
    }

    check_inside(flavors, tmp_path, uri="models:/m/1", file="MLmodel")
