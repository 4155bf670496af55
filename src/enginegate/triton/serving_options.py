"""What a policy's ``[serving]`` table becomes in Triton's ``ModelConfig``.

Only what differs from Triton's own default is written, so that a configuration without options
keeps the text it always had.
"""

from typing import Any

from enginegate.errors import ModelError
from enginegate.serving import BackendSettings, ServingConfig, ServingOptions


def apply_serving(message: Any, serving: ServingConfig, *, gpu: bool) -> None:
    """Write batching and instances into a ``ModelConfig``.

    GPUs of the configuration are left out for an engine that runs on the CPU.

    Raises:
        ModelError: a preferred batch is larger than the largest, or is asked for without batching.
    """
    message.max_batch_size = serving.max_batch_size
    if serving.dynamic_batching:
        too_large = [n for n in serving.preferred_batch_sizes if n > serving.max_batch_size]
        if too_large:
            raise ModelError(
                f"A preferred batch of {too_large[0]} is larger than max_batch_size "
                f"{serving.max_batch_size}: Triton refuses that. Drop it from "
                "search.preferred_batch_sizes, or allow larger batches."
            )
        batching = message.dynamic_batching
        batching.max_queue_delay_microseconds = serving.max_queue_delay_us
        batching.preferred_batch_size.extend(sorted(set(serving.preferred_batch_sizes)))
    elif serving.preferred_batch_sizes or serving.max_queue_delay_us:
        raise ModelError(
            f"Preferred batches and a queue delay need dynamic batching, and {serving} has none. "
            "Take them out of that configuration."
        )
    group = message.instance_group.add(count=serving.instances)
    group.kind = group.KIND_GPU if gpu else group.KIND_CPU
    if gpu:
        group.gpus.extend(serving.gpus)


def apply_options(message: Any, options: ServingOptions) -> None:
    """Write everything else into a ``ModelConfig`` that already has batching and instances.

    Raises:
        ModelError: an option of the queue is set, and there is no dynamic batching, which is what
            has a queue.
    """
    _apply_queue(message, options)
    if options.response_cache:
        message.response_cache.enable = True
    for group in message.instance_group:
        for name, count in sorted(options.rate_limiter_resources.items()):
            group.rate_limiter.resources.add(name=name, count=count)
        if options.rate_limiter_priority:
            group.rate_limiter.priority = options.rate_limiter_priority
    _apply_optimization(message, options)


def apply_settings(message: Any, settings: BackendSettings) -> None:
    """Write the graph level and the CUDA provider's settings into a ``ModelConfig``."""
    if settings.graph_level:
        message.optimization.graph.level = settings.graph_level
    if settings.cuda_provider:
        accelerators = message.optimization.execution_accelerators
        provider = accelerators.gpu_execution_accelerator.add(name="cuda")
        for name, value in sorted(settings.cuda_provider.items()):
            provider.parameters[name] = value


def warmup_sizes(serving: ServingConfig, options: ServingOptions) -> tuple[int, ...]:
    """Batch sizes that are run before a version counts as ready, smallest first.

    Raises:
        ModelError: one is larger than the largest batch.
    """
    wanted = options.warmup_batch_sizes or (1, serving.max_batch_size)
    if max(wanted) > serving.max_batch_size:
        raise ModelError(
            f"serving.warmup_batch_sizes has {max(wanted)}, and this configuration's largest batch "
            f"is {serving.max_batch_size}: the warm-up would fail, and with it every load."
        )
    return tuple(sorted(set(wanted)))


def _apply_queue(message: Any, options: ServingOptions) -> None:
    wanted = [name for name in _QUEUE if getattr(options, name) != getattr(_DEFAULT, name)]
    if not wanted:
        return
    if not message.HasField("dynamic_batching"):
        raise ModelError(
            f"serving.{wanted[0]} is set, and this configuration has no dynamic batching: Triton "
            "has the queue that it belongs to only there."
        )
    batching = message.dynamic_batching
    batching.preserve_ordering = options.preserve_ordering
    batching.priority_levels = options.priority_levels
    batching.default_priority_level = options.default_priority_level
    if set(wanted) & _QUEUE_POLICY:
        policy = batching.default_queue_policy
        delays = options.timeout_action == "delay"
        policy.timeout_action = policy.DELAY if delays else policy.REJECT
        policy.default_timeout_microseconds = options.queue_timeout_us
        policy.allow_timeout_override = options.allow_timeout_override
        policy.max_queue_size = options.max_queue_size


def _apply_optimization(message: Any, options: ServingOptions) -> None:
    if not options.input_pinned_memory:
        message.optimization.input_pinned_memory.enable = False
    if not options.output_pinned_memory:
        message.optimization.output_pinned_memory.enable = False
    if options.gather_kernel_buffer_threshold:
        threshold = options.gather_kernel_buffer_threshold
        message.optimization.gather_kernel_buffer_threshold = threshold
    if options.eager_batching:
        message.optimization.eager_batching = True
    if options.cuda_graphs:
        message.optimization.cuda.graphs = True
    if options.cuda_busy_wait_events:
        message.optimization.cuda.busy_wait_events = True
    if options.cuda_output_copy_stream:
        message.optimization.cuda.output_copy_stream = True
    if options.model_priority != "default":
        message.optimization.priority = f"PRIORITY_{options.model_priority.upper()}"


_DEFAULT = ServingOptions()
_QUEUE_POLICY = {"max_queue_size", "queue_timeout_us", "timeout_action", "allow_timeout_override"}
_QUEUE = ("priority_levels", "default_priority_level", "preserve_ordering", *sorted(_QUEUE_POLICY))
