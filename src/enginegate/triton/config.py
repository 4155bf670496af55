"""``config.pbtxt``, made from Triton's own protobuf message and checked by it; never a template.

A configuration has two forms: text (the file) and JSON (the override that travels with a load).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from enginegate.candidate import TensorSpec
from enginegate.errors import ModelError, ServerError
from enginegate.serving import BackendSettings, ServingConfig, ServingOptions
from enginegate.triton.serving_options import (
    apply_options,
    apply_serving,
    apply_settings,
    warmup_sizes,
)

_TRITON_TYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
}
NATIVE_FILES = {"onnxruntime": "model.onnx", "tensorrt": "model.plan"}
OPENED_FILES = {
    "python": "model.py",
    **NATIVE_FILES,
    "onnxruntime_onnx": "model.onnx",
    "tensorrt_plan": "model.plan",
}
_PLAIN = ServingOptions()
_AS_IT_IS = BackendSettings()
_NUMPY_TYPES = {triton: numpy for numpy, triton in _TRITON_TYPES.items()}


def triton_type(dtype: str) -> str:
    """Triton's name of a NumPy dtype, e.g. ``FP32`` for ``float32``.

    Raises:
        ModelError: Triton has no such type, or this program does not carry it.
    """
    if dtype not in _TRITON_TYPES:
        raise ModelError(
            f"Tensors of dtype {dtype!r} cannot be sent to Triton.\n"
            f"Supported: {', '.join(_TRITON_TYPES)}. Cast the tensor inside the model."
        )
    return _TRITON_TYPES[dtype]


def numpy_type(triton: str) -> str:
    """NumPy's name of a Triton type, with or without ``TYPE_``, e.g. ``float32`` for ``FP32``.

    Raises:
        ModelError: NumPy has no such type, or this program does not carry it.
    """
    name = triton.removeprefix("TYPE_")
    if name not in _NUMPY_TYPES:
        raise ModelError(
            f"Triton's type {triton} cannot be read here.\n"
            f"Supported: {', '.join(_NUMPY_TYPES)}. Cast the tensor inside the model."
        )
    return _NUMPY_TYPES[name]


@dataclass(frozen=True, slots=True)
class Config:
    """One model's configuration. Two are equal when Triton would treat them alike.

    Attributes:
        message: Triton's ``ModelConfig``; only this room looks inside.
    """

    message: Any

    def __reduce__(self) -> tuple[Any, ...]:
        """Messages cannot be sent to another process; their bytes can."""
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
        """What the backend opens in a version's folder; empty for a backend that is not known."""
        usual = OPENED_FILES.get(self.backend or str(self.message.platform), "")
        return str(self.message.default_model_filename) or usual

    @property
    def parameters(self) -> dict[str, str]:
        """The string parameters: what a release or a search wrote to recognise itself."""
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
            instances=sum(group.count for group in groups) or 1,
            preferred_batch_sizes=() if preferred == (self.message.max_batch_size,) else preferred,
            gpus=tuple(sorted({gpu for group in groups for gpu in group.gpus})),
            dynamic_batching=self.message.HasField("dynamic_batching"),
        )

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
    options: ServingOptions = _PLAIN,
    settings: BackendSettings = _AS_IT_IS,
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
        warmup: run batches of zeros before a version counts as ready: of 1 and of the largest
            size, unless the options name others. Other dynamic axes are warmed up at size 1.
        gpu: place instances on GPUs instead of the CPU.
        options: everything else that a policy may set.
        settings: what the backend is told so that it runs the engine as it was validated.

    Raises:
        ModelError: a tensor has a dtype that Triton cannot carry, or no batch axis; or two settings
            exclude each other.
    """
    config = bare_config(name, inputs, outputs)
    message = config.message
    message.backend = backend
    if backend in NATIVE_FILES:
        message.default_model_filename = NATIVE_FILES[backend]
    apply_serving(message, serving, gpu=gpu)
    apply_options(message, options)
    apply_settings(message, settings)
    for key, value in sorted({**settings.parameters, **parameters}.items()):
        message.parameters[key].string_value = value
    if versions is not None:
        message.version_policy.specific.versions.extend(sorted(versions))
    if warmup:
        _warm_up(message, inputs, warmup_sizes(serving, options), options.warmup_count)
    return config


def bare_config(
    name: str, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
) -> Config:
    """A configuration that says only which tensors go in and come out.

    Raises:
        ModelError: a tensor has a dtype that Triton cannot carry, or no batch axis.
    """
    message = _messages().ModelConfig(name=name)
    for spec in inputs:
        _describe(message.input.add(), spec)
    for spec in outputs:
        _describe(message.output.add(), spec)
    return Config(message)


def config_text(config: Config) -> str:
    """What ``config.pbtxt`` holds; the same configuration gives the same text."""
    from google.protobuf import text_format  # type: ignore[import-untyped]  # noqa: PLC0415

    return str(text_format.MessageToString(config.message, use_index_order=True))


def config_json(config: Config) -> str:
    """What a load call carries to override the file."""
    from google.protobuf import json_format  # noqa: PLC0415

    return str(
        json_format.MessageToJson(config.message, preserving_proto_field_name=True, indent=None)
    )


def read_config(text: str, origin: str) -> Config:
    """Read the text of a ``config.pbtxt``; ``origin`` names it in errors.

    Raises:
        ServerError: it is not a model configuration.
    """
    from google.protobuf import text_format  # noqa: PLC0415

    try:
        return Config(text_format.Parse(text, _messages().ModelConfig()))
    except text_format.ParseError as error:
        raise ServerError(
            f"{origin} is not a Triton model configuration: {error}.\n"
            "It was edited by hand or cut short. Publish the release again."
        ) from error


def _from_bytes(content: bytes) -> Config:
    return Config(_messages().ModelConfig.FromString(content))


def _messages() -> Any:
    try:
        from tritonclient.grpc import (  # type: ignore[import-untyped]  # noqa: PLC0415
            model_config_pb2,
        )
    except ImportError as error:
        raise ServerError(
            f"Triton's messages cannot be imported: {error}.\n"
            "Install the client: python -m pip install 'enginegate[triton]'"
        ) from error
    return model_config_pb2


def _describe(tensor: Any, spec: TensorSpec) -> None:
    if not spec.shape:
        raise ModelError(f"{spec} has no batch axis, so Triton cannot batch it.")
    tensor.name = spec.name
    tensor.data_type = _messages().DataType.Value(f"TYPE_{triton_type(spec.dtype)}")
    tensor.dims.extend(spec.shape[1:] or (1,))
    if not spec.shape[1:]:
        # Triton refuses empty dims: a tensor of one number a sample is declared [1], reshaped [].
        tensor.reshape.SetInParent()


def _spec(tensor: Any) -> TensorSpec:
    dims = tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims
    name = _messages().DataType.Name(tensor.data_type)
    return TensorSpec(name=tensor.name, dtype=numpy_type(name), shape=(-1, *dims))


def _warm_up(
    message: Any, inputs: tuple[TensorSpec, ...], sizes: tuple[int, ...], count: int
) -> None:
    for size in sizes:
        sample = message.model_warmup.add(name=f"batch_{size}", batch_size=size, count=count)
        for spec in inputs:
            tensor = sample.inputs[spec.name]
            tensor.data_type = _messages().DataType.Value(f"TYPE_{triton_type(spec.dtype)}")
            tensor.dims.extend(max(axis, 1) for axis in spec.shape[1:] or (1,))
            tensor.zero_data = True
