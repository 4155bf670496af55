"""Which releases can be loaded side by side, decided from their configurations alone."""

import re

import pytest

from enginegate.candidate import TensorSpec
from enginegate.serving import BackendSettings, ServingConfig, ServingOptions
from enginegate.triton.config import model_config, read_config
from enginegate.triton.release_labels import write_labels
from enginegate.triton.version_sharing import sharing_obstacle

X = TensorSpec(name="x", dtype="float32", shape=(-1, 4))
SERVING = ServingConfig(max_batch_size=8, max_queue_delay_us=100, instances=2)


def _config(**changes):
    arguments = {
        "name": "digits",
        "inputs": (X,),
        "outputs": (X.model_copy(update={"name": "y"}),),
        "serving": SERVING,
        "backend": "python",
        "parameters": {},
    }
    return model_config(**{**arguments, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"serving": ServingConfig(max_batch_size=32, max_queue_delay_us=0, instances=4)},
        {
            "options": ServingOptions(
                max_queue_size=8,
                response_cache=True,
                warmup_batch_sizes=(2,),
                input_pinned_memory=False,
                rate_limiter_resources={"compute": 1},
            )
        },
        {"versions": (1, 2)},
    ],
    ids=["same", "batching", "options", "versions"],
)
def test_how_much_is_served_may_differ(changes):
    """An int8 engine with another batching stands by as before, whatever digests are named."""
    new = _config(**changes)
    write_labels(new, {1: "a" * 64, 2: "b" * 64})

    assert sharing_obstacle(_config(), new) == ""


def test_streams_of_the_runner_may_differ():
    """Instances of our runner on a GPU are a parameter, and as free as other instances."""
    more = SERVING.model_copy(update={"instances": 4})

    assert sharing_obstacle(_config(gpu=True), _config(gpu=True, serving=more)) == ""


THREADS = BackendSettings(parameters={"intra_op_thread_count": "1"})
FP32 = BackendSettings(cuda_provider={"use_tf32": "0"})
TF32 = BackendSettings(cuda_provider={"use_tf32": "1"})
NATIVE = {"backend": "onnxruntime"}
PLAN = {"backend": "tensorrt", "gpu": True}


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (NATIVE, {}, 'backend: "onnxruntime" became backend: "python"'),
        ({}, NATIVE, 'backend: "python" became backend: "onnxruntime"'),
        (PLAN, NATIVE, 'backend: "tensorrt" became'),
        ({}, {"gpu": True}, "kind: KIND_CPU became kind: KIND_GPU"),
        (NATIVE, NATIVE | {"settings": THREADS}, "no parameters became parameters.*thread_count"),
        (NATIVE | {"settings": FP32}, NATIVE | {"settings": TF32}, 'use_tf32.*"0".*became.*"1"'),
        (NATIVE | {"settings": BackendSettings(graph_level=-1)}, NATIVE, "graph.*became no opt"),
        ({}, {"inputs": (X.model_copy(update={"shape": (-1, 5)}),)}, "dims: 4.*became.*dims: 5"),
        ({}, {"outputs": (X,)}, "output .*became output"),
        (
            PLAN,
            PLAN | {"serving": SERVING.model_copy(update={"max_batch_size": 16})},
            "max_batch_size: 8 became 16, which the older plan may not take",
        ),
    ],
)
def test_how_files_are_opened_may_not(old, new, why):
    """The older version's files would be loaded with what does not fit them; the reason is told."""
    found = sharing_obstacle(_config(**old), _config(**new))

    assert found
    assert re.search(why, found), found


def test_smaller_largest_batch_is_no_obstacle_to_a_plan():
    """A plan takes every batch up to its own largest."""
    smaller = SERVING.model_copy(update={"max_batch_size": 4})

    assert sharing_obstacle(_config(**PLAN), _config(**PLAN, serving=smaller)) == ""


def test_platform_and_backend_are_both_compared():
    """A step of an ensemble may name its backend in the older of Triton's two ways."""
    old = read_config('name: "m" platform: "onnxruntime_onnx" max_batch_size: 4', "old")
    new = read_config('name: "m" platform: "tensorrt_plan" max_batch_size: 4', "new")

    assert "onnxruntime_onnx" in sharing_obstacle(old, new)
    assert (old.opened_file, new.opened_file) == ("model.onnx", "model.plan")
