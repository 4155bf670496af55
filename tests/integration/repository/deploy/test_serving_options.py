"""What a policy tells Triton is in force on a real one, which is asked for what it has."""

from dataclasses import replace

import pytest

from enginegate.errors import PublishError
from enginegate.repository import verify
from enginegate.serving import ServingConfig, ServingOptions
from enginegate.triton.backends import server_has_backend

pytestmark = pytest.mark.triton
OPTIONS = ServingOptions(
    priority_levels=3,
    default_priority_level=2,
    max_queue_size=64,
    queue_timeout_us=2_000_000,
    timeout_action="delay",
    allow_timeout_override=True,
    response_cache=True,
    rate_limiter_resources={"compute": 1},
    rate_limiter_priority=2,
    input_pinned_memory=False,
    output_pinned_memory=False,
    gather_kernel_buffer_threshold=4,
    eager_batching=True,
    warmup_batch_sizes=(2, 4),
    warmup_count=2,
)
SERVING = ServingConfig(
    max_batch_size=8, max_queue_delay_us=100, instances=1, preferred_batch_sizes=(2, 4)
)


def test_every_option_a_cpu_can_have_is_in_force(repository, package, ask):
    """The release records them, Triton accepts them, and shows them as sent."""
    made = repository.publish(package(1.0, serving=SERVING, options=OPTIONS), expected=None)

    found = repository.client.config("digits")
    batching, message = found.message.dynamic_batching, found.message
    policy = batching.default_queue_policy
    assert (made.engine.options, found.serving, ask()) == (OPTIONS, SERVING, (1, 1.0))
    assert (batching.priority_levels, batching.default_priority_level) == (3, 2)
    assert (policy.max_queue_size, policy.default_timeout_microseconds) == (64, 2_000_000)
    assert (policy.timeout_action, policy.allow_timeout_override) == (policy.DELAY, True)
    assert message.response_cache.enable
    assert message.optimization.eager_batching
    assert not message.optimization.input_pinned_memory.enable
    assert message.instance_group[0].rate_limiter.resources[0].name == "compute"
    assert [sample.batch_size for sample in message.model_warmup] == [2, 4]
    assert [check.problem for check in verify(repository) if check.problem] == []


def test_backend_probe_leaves_the_server_unchanged(repository, package):
    """This one has the Python backend only; the same words undo a release that needs another."""
    assert not server_has_backend(repository.client, "onnxruntime")
    assert repository.client.index() == ()
    assert list(repository.root.iterdir()) == []

    made = package(1.0, backend="onnxruntime")
    native = replace(made, files={**made.files, "model.onnx": made.files["engine.bin"]})
    with pytest.raises(PublishError, match="unable to find backend library for backend 'onnx"):
        repository.publish(native, expected=None)

    assert not (repository.root / "digits").exists()
