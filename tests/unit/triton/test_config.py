from pathlib import Path

import pytest

from enginegate.candidate import TensorSpec
from enginegate.errors import ModelError, ServerError
from enginegate.evidence import ServingConfig
from enginegate.triton.config import (
    config_json,
    config_text,
    model_config,
    numpy_type,
    read_config,
    triton_type,
)

SERVING = ServingConfig(max_batch_size=8, max_queue_delay_us=500, instances=2)
PIXELS = TensorSpec(name="pixels", dtype="float32", shape=(-1, 1, 8, -1))
LABEL = TensorSpec(name="label", dtype="int64", shape=(-1,))


def _config(**changes):
    arguments = {
        "name": "digits",
        "inputs": (PIXELS,),
        "outputs": (LABEL,),
        "serving": SERVING,
        "backend": "python",
        "parameters": {"b": "2", "a": 'quote " and\nline'},
        "versions": (4, 3),
    }
    return model_config(**{**arguments, **changes})


def test_text_is_golden():
    """The text of a configuration, whole."""
    golden = Path(__file__).parent / "config.pbtxt"

    assert config_text(_config()) == golden.read_text()


def test_text_comes_back_as_it_was():
    """Parsing the text gives an equal configuration, with every field readable."""
    found = read_config(config_text(_config()), "file")

    assert found == _config()
    assert (found.name, found.backend, found.versions) == ("digits", "python", (3, 4))
    assert found.parameters == {"a": 'quote " and\nline', "b": "2"}
    assert found.serving == SERVING
    assert (found.inputs, found.outputs) == ((PIXELS,), (LABEL,))


def test_the_order_of_parameters_does_not_matter():
    """Equal content gives equal text: a file's digest means something."""
    other = _config(parameters={"a": 'quote " and\nline', "b": "2"}, versions=(3, 4))

    assert config_text(other) == config_text(_config())


def test_json_names_fields_as_triton_does():
    """The override form uses the field names of the configuration file."""
    text = config_json(_config())

    assert '"max_batch_size": 8' in text
    assert '"max_queue_delay_microseconds": "500"' in text
    assert '"versions": ["3", "4"]' in text


def test_options():
    """No version policy, no warm-up and GPU instances when told so."""
    plain = _config(versions=None, warmup=False, gpu=True)

    text = config_text(plain)
    assert plain.versions is None
    assert "version_policy" not in text
    assert "model_warmup" not in text
    assert "KIND_GPU" in text


def test_warm_up_of_one_size_is_not_repeated():
    """With a largest batch of 1 there is one warm-up sample."""
    single = _config(serving=SERVING.model_copy(update={"max_batch_size": 1}))

    assert config_text(single).count("model_warmup") == 1


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


def test_a_tensor_without_batch_axis():
    """A tensor that has no first axis cannot be batched."""
    with pytest.raises(ModelError, match="has no batch axis"):
        _config(inputs=(TensorSpec(name="x", dtype="float32", shape=()),))


def test_text_that_is_no_configuration():
    """A file that was cut or edited names itself and the place."""
    with pytest.raises(ServerError, match=r"(?s)live/config\.pbtxt is not.*Publish"):
        read_config(config_text(_config())[:-10] + "{", "live/config.pbtxt")
