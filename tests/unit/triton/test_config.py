from pathlib import Path

import pytest
from google.protobuf import text_format

from enginegate.candidate import TensorSpec
from enginegate.engine_kinds import NativeBackend
from enginegate.errors import ModelError, ServerError
from enginegate.serving import ServingConfig, ServingOptions
from enginegate.triton import config as written
from enginegate.triton.config import (
    config_json,
    config_text,
    model_config,
    read_config,
)

SERVING = ServingConfig(max_batch_size=8, max_queue_delay_us=500, instances=2)
PIXELS = TensorSpec(name="pixels", dtype="float32", shape=(-1, 1, 8, -1))
LABEL = TensorSpec(name="label", dtype="int64", shape=(-1,))


ALL_OPTIONS = ServingOptions(
    priority_levels=3,
    default_priority_level=2,
    max_queue_size=64,
    queue_timeout_us=20_000,
    timeout_action="delay",
    allow_timeout_override=True,
    response_cache=True,
    rate_limiter_resources={"compute": 2, "bus": 1},
    rate_limiter_priority=4,
    input_pinned_memory=False,
    output_pinned_memory=False,
    gather_kernel_buffer_threshold=16,
    eager_batching=True,
    cuda_graphs=True,
    cuda_busy_wait_events=True,
    cuda_output_copy_stream=True,
    model_priority="max",
    warmup_batch_sizes=(4, 2),
    warmup_count=5,
)


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


def test_text_is_read_back_unchanged():
    """Parsing the text gives an equal configuration, with every field readable."""
    found = read_config(config_text(_config()), "file")

    assert found == _config()
    assert (found.name, found.backend, found.versions) == ("digits", "python", (3, 4))
    assert found.parameters == {"a": 'quote " and\nline', "b": "2"}
    assert found.serving == SERVING
    assert (found.inputs, found.outputs) == ((PIXELS,), (LABEL,))


def test_order_of_parameters_does_not_change_the_text():
    """Equal content gives equal text: a file's digest means something."""
    other = _config(parameters={"a": 'quote " and\nline', "b": "2"}, versions=(3, 4))

    assert config_text(other) == config_text(_config())


def test_json_names_fields_as_triton_does():
    """The override form uses the field names of the configuration file."""
    text = config_json(_config())

    assert '"max_batch_size": 8' in text
    assert '"max_queue_delay_microseconds": "500"' in text
    assert '"versions": ["3", "4"]' in text


def test_versions_warm_up_and_device_are_optional():
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


def test_tensor_without_batch_axis_is_refused():
    """A tensor that has no first axis cannot be batched."""
    with pytest.raises(ModelError, match="has no batch axis"):
        _config(inputs=(TensorSpec(name="x", dtype="float32", shape=()),))


def test_damaged_text_is_refused():
    """A file that was cut or edited names itself and the place."""
    with pytest.raises(ServerError, match=r"(?s)live/config\.pbtxt is not.*Publish"):
        read_config(config_text(_config())[:-10] + "{", "live/config.pbtxt")


def test_text_with_every_option_is_golden():
    """Everything that a policy may set, on two GPUs with preferred batches, whole."""
    serving = SERVING.model_copy(update={"preferred_batch_sizes": (4, 2), "gpus": (0, 1)})
    found = _config(backend="tensorrt", serving=serving, options=ALL_OPTIONS, gpu=True)
    golden = Path(__file__).parent / "options.pbtxt"

    assert config_text(found) == golden.read_text()


@pytest.mark.parametrize(
    "changes",
    [
        {"preferred_batch_sizes": (2, 4)},
        {"gpus": (0, 2)},
        {"dynamic_batching": False, "max_queue_delay_us": 0},
        {"preferred_batch_sizes": (8,), "instances": 5},
    ],
    ids=["preferred", "gpus", "no-batching", "largest-is-preferred"],
)
def test_serving_configuration_is_read_back(changes):
    """What a search varies can be read from what a server says is in force."""
    serving = ServingConfig(**{**SERVING.model_dump(), **changes})

    found = read_config(config_text(_config(serving=serving, gpu=True)), "file").serving

    # Triton itself writes the largest batch where no size is preferred: the two mean the same.
    alike = {"preferred_batch_sizes": ()} if serving.preferred_batch_sizes == (8,) else {}
    assert found == serving.model_copy(update=alike)


@pytest.mark.parametrize("processes", [1, 2])
def test_runner_on_a_gpu_is_processes_with_streams(processes):
    """Its instances are the streams of each process. Inputs stay where they are."""
    serving = ServingConfig(**{**SERVING.model_dump(), "instances": 3, "processes": processes})

    found = _config(serving=serving, gpu=True)

    assert [group.count for group in found.message.instance_group] == [processes]
    assert (found.streams, found.serving) == (3, serving)
    assert found.parameters["FORCE_CPU_ONLY_INPUT_TENSORS"] == "no"


@pytest.mark.parametrize("backend", ["python", "tensorrt"])
def test_instances_elsewhere_are_instances(backend):
    """On a processor, and in Triton's own backends, each instance is one of Triton's."""
    found = _config(
        serving=ServingConfig(**{**SERVING.model_dump(), "instances": 3}),
        backend=backend,
        gpu=backend == "tensorrt",
    )

    assert [group.count for group in found.message.instance_group] == [3]
    assert (found.streams, found.serving.instances) == (0, 3)


def test_ordering_can_be_preserved():
    """The one option that Triton refuses beside several priorities."""
    found = _config(options=ServingOptions(preserve_ordering=True))

    assert found.message.dynamic_batching.preserve_ordering


def test_gpus_are_ignored_on_a_cpu():
    """A search over GPUs can measure an engine for the CPU beside the others."""
    serving = SERVING.model_copy(update={"gpus": (0, 1)})

    assert config_text(_config(serving=serving)) == config_text(_config())


@pytest.mark.parametrize(
    ("backend", "filename"),
    [("onnxruntime", "model.onnx"), ("tensorrt", "model.plan"), ("python", "")],
)
def test_native_backend_names_its_file(backend, filename):
    """Triton's own backends open a named file; the Python backend finds its model.py."""
    found = _config(backend=backend)

    assert (found.backend, found.message.default_model_filename) == (backend, filename)


@pytest.mark.parametrize(
    ("preferred", "asked", "graphs", "warmed"),
    [
        ((4,), (), [1, 4, 8], [1, 4, 8]),
        ((4,), (2, 6), [2, 6], [1, 2, 4, 6, 8]),
        ((), (), [1, 8], [1, 8]),
    ],
    ids=["chosen-sizes", "named-sizes", "no-preferred"],
)
def test_cuda_graphs_are_captured_for_the_sizes_that_are_served(preferred, asked, graphs, warmed):
    """Each size that has a graph, or is preferred, is also run before a version is ready."""
    options = ServingOptions(cuda_graphs=True, cuda_graph_batch_sizes=asked)
    serving = SERVING.model_copy(update={"preferred_batch_sizes": preferred})

    message = _config(backend="tensorrt", serving=serving, options=options, gpu=True).message

    assert [spec.batch_size for spec in message.optimization.cuda.graph_spec] == graphs
    assert [sample.batch_size for sample in message.model_warmup] == warmed


def test_platform_is_stated_where_the_backend_alone_means_another_format(monkeypatch):
    """Triton's PyTorch backend takes TorchScript unless the platform says otherwise."""
    aoti = NativeBackend("pytorch", "model.pt2", platform="torch_aoti", names_platform=True)
    monkeypatch.setattr(written, "native_backends", lambda: {"pytorch": aoti})

    message = _config(backend="pytorch", gpu=True).message

    assert (message.backend, message.platform) == ("pytorch", "torch_aoti")
    assert message.default_model_filename == "model.pt2"
    assert not _config(backend="python").message.platform


UNBATCHED = {"dynamic_batching": False, "max_queue_delay_us": 0}


@pytest.mark.parametrize(
    ("serving", "options", "message"),
    [
        ({"preferred_batch_sizes": (9,)}, {}, "preferred batch of 9 is larger"),
        ({"dynamic_batching": False}, {}, "need dynamic batching"),
        (UNBATCHED | {"preferred_batch_sizes": (2,)}, {}, "need dynamic batching"),
        ({"processes": 2}, {}, "only this program's runner .* shares a GPU between processes"),
        (UNBATCHED, {"max_queue_size": 4}, "max_queue_size is set.*no dynamic batching"),
        (UNBATCHED, {"preserve_ordering": True}, "preserve_ordering is set"),
        ({}, {"warmup_batch_sizes": (1, 16)}, "warmup_batch_sizes has 16.*is 8"),
        (
            {},
            {"cuda_graphs": True, "cuda_graph_batch_sizes": (1, 16)},
            "cuda_graph_batch_sizes has 16.*is 8",
        ),
    ],
)
def test_contradictory_settings_are_refused(serving, options, message):
    """Triton would refuse the load, or overlook one of them: said before anything is written."""
    with pytest.raises(ModelError, match=message):
        _config(
            serving=ServingConfig(**{**SERVING.model_dump(), **serving}),
            options=ServingOptions(**options),
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority_levels": 2}, "need each other"),
        ({"default_priority_level": 1}, "need each other"),
        ({"priority_levels": 2, "default_priority_level": 3}, "is 3, and there are 2"),
        ({"timeout_action": "delay"}, "needs queue_timeout_us"),
        ({"cuda_graph_batch_sizes": (4,)}, "needs cuda_graphs = true"),
        (
            {"priority_levels": 2, "default_priority_level": 1, "preserve_ordering": True},
            "one priority level only",
        ),
    ],
)
def test_contradictory_options_are_refused(options, message):
    """A policy with such a table is refused when it is read."""
    with pytest.raises(ValueError, match=message):
        ServingOptions(**options)


def _texts(backend):
    """Of one model: one version, two, two and another instance; and the first two again."""
    two = {"versions": (1, 2), "backend": backend}
    return [
        written.config_text(config)
        for config in (
            _config(versions=(1,), backend=backend),
            _config(**two),
            _config(**two, serving=SERVING.model_copy(update={"instances": 3})),
            _config(**two),
        )
    ]


def _apart_from_what_changed(text):
    """What Triton compares to decide whether changing instances in place is enough."""
    message = written.vendor().configs.ModelConfig()
    text_format.Parse(text, message)
    message.ClearField("instance_group")
    message.ClearField("version_policy")
    return message.SerializeToString(deterministic=True)


def test_native_tensorrt_is_never_changed_in_place():
    """Its backend would go on using instances that are gone, and take the server with it."""
    one, two, more, again = _texts("tensorrt")

    assert len({_apart_from_what_changed(text) for text in (one, two, more)}) == 3
    assert again == two


def test_other_backends_keep_the_versions_that_serve():
    """A further version or instance is loaded beside them, and nothing is loaded again."""
    one, two, _, _ = _texts("onnxruntime")

    assert _apart_from_what_changed(one) == _apart_from_what_changed(two)


def test_what_makes_triton_load_anew_is_not_part_of_the_configuration():
    """Read back it is the one that was written."""
    config = _config(versions=(1,), backend="tensorrt")

    read = written.read_config(written.config_text(config), "config.pbtxt")

    assert read == config
    assert set(read.parameters) == {"a", "b"}
