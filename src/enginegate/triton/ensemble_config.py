"""Configurations of ensembles and of their composing models, as Triton's protobuf messages."""

from collections.abc import Mapping
from dataclasses import dataclass

from enginegate.candidate import TensorSpec
from enginegate.triton.config import Config, bare_config
from enginegate.triton.release_labels import write_labels

_PLATFORM = "ensemble"


@dataclass(frozen=True, slots=True)
class Wiring:
    """One model of an ensemble.

    Attributes:
        model: as Triton knows it.
        inputs: its input -> tensor of the ensemble.
        outputs: its output -> tensor of the ensemble.
    """

    model: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


def ensemble_config(
    name: str,
    steps: tuple[Wiring, ...],
    *,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    max_batch_size: int,
) -> Config:
    """The configuration of an ensemble; `config_for_versions` pins its versions.

    Raises:
        ModelError: a tensor has a dtype that Triton cannot carry, or no batch axis.
    """
    config = bare_config(name, inputs, outputs)
    config.message.platform = _PLATFORM
    config.message.max_batch_size = max_batch_size
    for wiring in steps:
        step = config.message.ensemble_scheduling.step.add(
            model_name=wiring.model, model_version=-1
        )
        for own, tensor in sorted(wiring.inputs.items()):
            step.input_map[own] = tensor
        for own, tensor in sorted(wiring.outputs.items()):
            step.output_map[own] = tensor
    return config


def composing_config(config: Config, name: str) -> Config:
    """A team's own configuration under the name it is published as, without its version policy."""
    copy = _copy(config)
    copy.message.name = name
    copy.message.ClearField("version_policy")
    return copy


def config_for_versions(
    config: Config, versions: tuple[int, ...], digests: Mapping[int, str]
) -> Config:
    """A copy that serves exactly these versions and carries the digests of their releases.

    An ensemble's steps are pinned to the highest of the versions.
    """
    copy = _copy(config)
    copy.message.version_policy.specific.versions.extend(sorted(versions))
    write_labels(copy, digests)
    for step in copy.message.ensemble_scheduling.step:
        step.model_version = max(versions)
    return copy


def with_largest_batch(config: Config, size: int) -> Config:
    """A copy that takes batches of at least ``size``."""
    copy = _copy(config)
    copy.message.max_batch_size = max(size, copy.message.max_batch_size)
    return copy


def composing_obstacle(config: Config) -> str:
    """Why a configuration cannot be a composing model's; empty if it can."""
    message = config.message
    if message.HasField("ensemble_scheduling") or message.platform == _PLATFORM:
        return "is an ensemble itself"
    if message.HasField("sequence_batching"):
        return "keeps sequences, which a change of versions would cut"
    if not message.backend and not message.platform:
        return 'names no backend (backend: "python")'
    if message.max_batch_size < 1:
        return "has no max_batch_size, so it takes no batches"
    return ""


def _copy(config: Config) -> Config:
    message = type(config.message)()
    message.CopyFrom(config.message)
    return Config(message)
