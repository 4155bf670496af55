"""``config.pbtxt``, made from Triton's own protobuf message and checked by it; never a template.

A configuration has two forms: text (the file) and JSON (the override that travels with a load).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from enginegate.candidate import TensorSpec
from enginegate.engine_kinds import native_backends
from enginegate.errors import ModelError, ServerError
from enginegate.serving import (
    STREAMS_PARAMETER,
    BackendSettings,
    ServingConfig,
    ServingOptions,
)
from enginegate.triton.codec import numpy_type, triton_type, vendor

_NO_OPTIONS = ServingOptions()
_NO_SETTINGS = BackendSettings()
# Policy's [serving] key -> field of ``ModelConfig``.
_OPTION_FIELDS = {
    "priority_levels": "dynamic_batching.priority_levels",
    "default_priority_level": "dynamic_batching.default_priority_level",
    "preserve_ordering": "dynamic_batching.preserve_ordering",
    "max_queue_size": "dynamic_batching.default_queue_policy.max_queue_size",
    "queue_timeout_us": "dynamic_batching.default_queue_policy.default_timeout_microseconds",
    "timeout_action": "dynamic_batching.default_queue_policy.timeout_action",
    "allow_timeout_override": "dynamic_batching.default_queue_policy.allow_timeout_override",
    "response_cache": "response_cache.enable",
    "input_pinned_memory": "optimization.input_pinned_memory.enable",
    "output_pinned_memory": "optimization.output_pinned_memory.enable",
    "gather_kernel_buffer_threshold": "optimization.gather_kernel_buffer_threshold",
    "eager_batching": "optimization.eager_batching",
    "cuda_graphs": "optimization.cuda.graphs",
    "cuda_busy_wait_events": "optimization.cuda.busy_wait_events",
    "cuda_output_copy_stream": "optimization.cuda.output_copy_stream",
    "model_priority": "optimization.priority",
}
# Triton changes only the instances of a model that serves where nothing else of its configuration
# changed. The TensorRT backend still hands requests to the instances that are gone, and dies under
# load (triton-inference-server/server issue 7723). So whatever changes its instances or versions
# also changes a parameter: Triton then loads the versions anew beside those that serve, and unloads
# these when they have answered.
_LOADED_ANEW = {"tensorrt", "tensorrt_plan"}
_ANEW_PARAMETER = "enginegate.loaded_anew"
_TRITON_WORDS = {"delay": "DELAY", "max": "PRIORITY_MAX", "min": "PRIORITY_MIN"}


def opened_file(backend: str) -> str:
    """The file that a backend or platform opens in a version's folder; empty if unknown."""
    files = {name: native.filename for name, native in native_backends().items()}
    platforms = {native.platform: native.filename for native in native_backends().values()}
    return ({"python": "model.py"} | platforms | files).get(backend, "")


@dataclass(frozen=True, slots=True)
class Config:
    """One model's configuration. Two are equal when Triton would treat them alike.

    Attributes:
        message: Triton's ``ModelConfig``; only ``enginegate.triton`` reads its fields.
    """

    message: Any

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the message's bytes: messages themselves cannot be pickled."""
        return _from_bytes, (self.message.SerializeToString(deterministic=True),)

    @property
    def name(self) -> str:
        """The model's name."""
        return str(self.message.name)

    @property
    def backend(self) -> str:
        """For example ``python``."""
        return str(self.message.backend)

    @property
    def opened_file(self) -> str:
        """The file that the backend opens in a version's folder; empty for an unknown backend."""
        usual = opened_file(self.backend or str(self.message.platform))
        return str(self.message.default_model_filename) or usual

    @property
    def parameters(self) -> dict[str, str]:
        """The string parameters, by which a release or a search recognises its configuration."""
        return {key: str(value.string_value) for key, value in self.message.parameters.items()}

    @property
    def versions(self) -> tuple[int, ...] | None:
        """The versions that are served; None when the policy is not ``specific``."""
        policy = self.message.version_policy
        if not policy.HasField("specific"):
            return None
        return tuple(int(version) for version in policy.specific.versions)

    @property
    def serving(self) -> ServingConfig:
        """Batching and instances.

        The largest batch as the only preferred one is Triton's default: it reads as none.
        """
        batching = self.message.dynamic_batching
        groups = self.message.instance_group
        preferred = tuple(batching.preferred_batch_size)
        return ServingConfig(
            max_batch_size=self.message.max_batch_size or 1,
            max_queue_delay_us=batching.max_queue_delay_microseconds,
            instances=self.streams or sum(group.count for group in groups) or 1,
            preferred_batch_sizes=() if preferred == (self.message.max_batch_size,) else preferred,
            gpus=tuple(sorted({gpu for group in groups for gpu in group.gpus})),
            dynamic_batching=self.message.HasField("dynamic_batching"),
            processes=max(1, sum(group.count for group in groups)) if self.streams else 1,
        )

    @property
    def streams(self) -> int:
        """Batches at once in each process of our runner on a GPU; 0 for every other model."""
        told = self.parameters.get(STREAMS_PARAMETER, "")
        return int(told) if self.message.backend == "python" and told.isdecimal() else 0

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Inputs, with the batch axis in front."""
        return tuple(_spec(tensor) for tensor in self.message.input)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Outputs, with the batch axis in front."""
        return tuple(_spec(tensor) for tensor in self.message.output)


def model_config(  # noqa: PLR0913 - one argument for each part of the message
    *,
    name: str,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    serving: ServingConfig,
    backend: str,
    parameters: Mapping[str, str],
    versions: tuple[int, ...] | None = None,
    warmup: bool = True,
    gpu: bool = False,
    options: ServingOptions = _NO_OPTIONS,
    settings: BackendSettings = _NO_SETTINGS,
) -> Config:
    """The configuration of a model that batches dynamically, unless ``serving`` says otherwise.

    Args:
        name: must equal the model's folder.
        inputs: with the batch as first axis, which Triton adds itself.
        outputs: likewise.
        serving: batching and instances.
        backend: Triton backend.
        parameters: strings this program can read back, besides those of ``settings``.
        versions: exactly these versions are served; None leaves Triton's policy (the highest).
        warmup: run batches of zeros before a version counts as ready: of 1, of the preferred and of
            the largest size, and of those with a CUDA graph, unless the options name others. Other
            dynamic axes are warmed up at size 1.
        gpu: place instances on GPUs instead of the CPU.
        options: everything else that a policy may set.
        settings: of the backend, so that it runs the engine as it was validated.

    Raises:
        ModelError: a tensor has a dtype that Triton cannot carry, or no batch axis; or two settings
            exclude each other.
    """
    config = bare_config(name, inputs, outputs)
    message = config.message
    message.backend = backend
    native = native_backends().get(backend)
    if native is not None:
        message.default_model_filename = native.filename
        message.platform = native.platform if native.names_platform else ""
    _apply_serving(message, serving, gpu=gpu)
    _apply_processes(message, serving, gpu=gpu)
    _apply_options(message, options)
    if options.cuda_graphs:
        for size in _graph_sizes(message, options):
            message.optimization.cuda.graph_spec.add(batch_size=size)
    if settings.graph_level:
        message.optimization.graph.level = settings.graph_level
    if settings.cuda_provider:
        accelerators = message.optimization.execution_accelerators.gpu_execution_accelerator
        accelerators.add(name="cuda").parameters.update(settings.cuda_provider)
    for key, value in sorted({**settings.parameters, **parameters}.items()):
        message.parameters[key].string_value = value
    if versions is not None:
        message.version_policy.specific.versions.extend(sorted(versions))
    if warmup:
        _warm_up(message, inputs, options)
    return config


def bare_config(
    name: str, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
) -> Config:
    """A configuration with nothing but the model's name and its tensors.

    Raises:
        ModelError: a tensor has a dtype that Triton cannot carry, or no batch axis.
    """
    message = vendor().configs.ModelConfig(name=name)
    for spec in inputs:
        _describe(message.input.add(), spec)
    for spec in outputs:
        _describe(message.output.add(), spec)
    return Config(message)


def config_text(config: Config) -> str:
    """The text of ``config.pbtxt``; equal configurations give equal text."""
    from google.protobuf import text_format  # type: ignore[import-untyped]  # noqa: PLC0415

    return str(text_format.MessageToString(_sent(config), use_index_order=True))


def config_json(config: Config) -> str:
    """The JSON that a load call carries to override the file."""
    from google.protobuf import json_format  # noqa: PLC0415

    return str(
        json_format.MessageToJson(_sent(config), preserving_proto_field_name=True, indent=None)
    )


def is_loaded_anew(config: Config) -> bool:
    """Whether a change of versions or instances loads versions that serve once more, beside them.

    It does for native TensorRT: each of them needs its memory twice for that moment.
    """
    return bool({config.backend, str(config.message.platform)} & _LOADED_ANEW)


def received(message: Any) -> Config:
    """The configuration in Triton's ``message``, which is changed."""
    if _ANEW_PARAMETER in message.parameters:
        del message.parameters[_ANEW_PARAMETER]
    return Config(message)


def _sent(config: Config) -> Any:
    """The message as Triton gets it."""
    if not is_loaded_anew(config):
        return config.message
    message = type(config.message)()
    message.CopyFrom(config.message)
    changing = type(message)(
        instance_group=message.instance_group,
        version_policy=message.version_policy if message.HasField("version_policy") else None,
    )
    digest = hashlib.sha256(changing.SerializeToString(deterministic=True)).hexdigest()
    message.parameters[_ANEW_PARAMETER].string_value = digest
    return message


def read_config(text: str, origin: str) -> Config:
    """Read the text of a ``config.pbtxt``; ``origin`` names it in errors.

    Raises:
        ServerError: it is not a model configuration.
    """
    from google.protobuf import text_format  # noqa: PLC0415

    try:
        return received(text_format.Parse(text, vendor().configs.ModelConfig()))
    except text_format.ParseError as error:
        raise ServerError(
            f"{origin} is not a Triton model configuration: {error}.\n"
            "It was edited by hand or cut short. Publish the release again."
        ) from error


def _apply_serving(message: Any, serving: ServingConfig, *, gpu: bool) -> None:
    """Write batching and instances; GPUs are left out for an engine that runs on the CPU."""
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


def _apply_processes(message: Any, serving: ServingConfig, *, gpu: bool) -> None:
    """Have our runner on a GPU compute on so many streams, in so many processes.

    Raises:
        ModelError: another model is to have several processes.
    """
    if gpu and message.backend == "python":
        message.instance_group[0].count = serving.processes
        message.parameters[STREAMS_PARAMETER].string_value = str(serving.instances)
        # Inputs that are in device memory stay there.
        message.parameters["FORCE_CPU_ONLY_INPUT_TENSORS"].string_value = "no"
    elif serving.processes > 1:
        raise ModelError(
            f"{message.name} cannot be served with {serving}: only this program's runner in the "
            "Python backend shares a GPU between processes. Take one process and more instances."
        )


def _apply_options(message: Any, options: ServingOptions) -> None:
    """Merge the options that differ from Triton's defaults, so that without any the text is short.

    Raises:
        ModelError: an option of the queue is set without dynamic batching, which has the queue.
    """
    from google.protobuf import json_format  # noqa: PLC0415

    changes: dict[str, Any] = {}
    for name, field in _OPTION_FIELDS.items():
        value = getattr(options, name)
        if value == getattr(_NO_OPTIONS, name):
            continue
        if field.startswith("dynamic_batching.") and not message.HasField("dynamic_batching"):
            raise ModelError(
                f"serving.{name} is set, and this configuration has no dynamic batching: Triton "
                "has the queue that it belongs to only there."
            )
        *parents, last = field.split(".")
        parent = changes
        for each in parents:
            parent = parent.setdefault(each, {})
        parent[last] = _TRITON_WORDS.get(value, value)
    json_format.ParseDict(changes, message)
    for group in message.instance_group:
        for name, count in sorted(options.rate_limiter_resources.items()):
            group.rate_limiter.resources.add(name=name, count=count)
        if options.rate_limiter_priority:
            group.rate_limiter.priority = options.rate_limiter_priority


def _working_sizes(message: Any) -> tuple[int, ...]:
    """Batch sizes that this configuration is made for: one row, the preferred, and the largest."""
    return (1, *message.dynamic_batching.preferred_batch_size, message.max_batch_size)


def _graph_sizes(message: Any, options: ServingOptions) -> tuple[int, ...]:
    """Batch sizes that a CUDA graph is captured for; a batch of another size runs without one.

    No lower bounds are stated, by which one graph would serve smaller batches too: the TensorRT
    backend of Triton 24.04 reads the graph's own size where the bound's should be, so they never
    match.

    Raises:
        ModelError: one is larger than the largest batch.
    """
    sizes = options.cuda_graph_batch_sizes or _working_sizes(message)
    largest = message.max_batch_size
    if max(sizes) > largest:
        raise ModelError(
            f"serving.cuda_graph_batch_sizes has {max(sizes)}, and this configuration's largest "
            f"batch is {largest}: Triton refuses that. Drop it, or allow larger batches."
        )
    return tuple(sorted(set(sizes)))


def _from_bytes(content: bytes) -> Config:
    return Config(vendor().configs.ModelConfig.FromString(content))


def _describe(tensor: Any, spec: TensorSpec) -> None:
    if not spec.shape:
        raise ModelError(f"{spec} has no batch axis, so Triton cannot batch it.")
    tensor.name = spec.name
    tensor.data_type = vendor().configs.DataType.Value(f"TYPE_{triton_type(spec.dtype)}")
    tensor.dims.extend(spec.shape[1:] or (1,))
    if not spec.shape[1:]:
        # Triton refuses empty dims: a tensor of one number a sample is declared [1], reshaped [].
        tensor.reshape.SetInParent()


def _spec(tensor: Any) -> TensorSpec:
    dims = tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims
    name = vendor().configs.DataType.Name(tensor.data_type)
    return TensorSpec(name=tensor.name, dtype=numpy_type(name), shape=(-1, *dims))


def _warm_up(message: Any, inputs: tuple[TensorSpec, ...], options: ServingOptions) -> None:
    """Have batches of zeros run before a version counts as ready, the smallest first.

    Raises:
        ModelError: one is larger than the largest batch.
    """
    largest = message.max_batch_size
    sizes = options.warmup_batch_sizes or (
        *_working_sizes(message),
        *(_graph_sizes(message, options) if options.cuda_graphs else ()),
    )
    if max(sizes) > largest:
        raise ModelError(
            f"serving.warmup_batch_sizes has {max(sizes)}, and this configuration's largest batch "
            f"is {largest}: the warm-up would fail, and with it every load."
        )
    for size in sorted(set(sizes)):
        sample = message.model_warmup.add(
            name=f"batch_{size}", batch_size=size, count=options.warmup_count
        )
        for spec in inputs:
            tensor = sample.inputs[spec.name]
            tensor.data_type = vendor().configs.DataType.Value(f"TYPE_{triton_type(spec.dtype)}")
            tensor.dims.extend(max(axis, 1) for axis in spec.shape[1:] or (1,))
            tensor.zero_data = True
