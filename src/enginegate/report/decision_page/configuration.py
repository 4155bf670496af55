"""The chosen configuration, line by line with the measurement that chose it; host and versions.

From the scorecard alone, so that the page can be made where the engine's files are not. Tensors,
warm-up and the engine's own settings follow from the engine; the whole file is filed beside it.
"""

from collections.abc import Iterator
from typing import NamedTuple

from enginegate.evidence import Benchmark, Scorecard
from enginegate.serving import STREAMS_PARAMETER, ServingOptions

_BY_POLICY = "[serving] of the policy"
_RUNNER = "python"
_ON_CPU = "CPU"


class ConfigurationLine(NamedTuple):
    """One line of ``config.pbtxt``; ``chosen_by`` is empty where nothing had to be chosen."""

    text: str
    chosen_by: str


class HostFact(NamedTuple):
    """One fact about where the evidence was made."""

    name: str
    value: str


class Configuration(NamedTuple):
    """The proposed candidate's lines, none where there is no winner; and where it was measured."""

    candidate: str
    lines: tuple[ConfigurationLine, ...]
    host: tuple[HostFact, ...]


def configuration_section(scorecard: Scorecard) -> Configuration:
    """The content of ``configuration.html``."""
    winner = scorecard.winner
    benchmark = scorecard.benchmark(winner) if winner else None
    lines = () if benchmark is None else tuple(configuration_lines(scorecard, benchmark))
    return Configuration(
        candidate=winner.name if winner else "",
        lines=lines,
        host=tuple(_host(scorecard)),
    )


def configuration_lines(scorecard: Scorecard, benchmark: Benchmark) -> Iterator[ConfigurationLine]:
    """What of ``config.pbtxt`` was chosen by measurement or set by the policy, in its syntax."""
    chosen, why = benchmark.chosen, benchmark.reasons
    if chosen is None:
        return
    on_gpu = _on_gpu(scorecard, benchmark)
    if benchmark.backend:
        yield ConfigurationLine(
            f'backend: "{benchmark.backend}"', "the engine was measured in this backend"
        )
    yield ConfigurationLine(
        f"max_batch_size: {chosen.max_batch_size}", why.get("max_batch_size", "")
    )
    yield from _batching_lines(benchmark)
    runs_streams = on_gpu and benchmark.backend == _RUNNER
    count = chosen.processes if runs_streams else chosen.instances
    instances = why.get("instances", "")
    yield ConfigurationLine("instance_group {", "")
    yield ConfigurationLine(
        f"  count: {count}", why.get("processes", "") if runs_streams else instances
    )
    yield ConfigurationLine(f"  kind: {'KIND_GPU' if on_gpu else 'KIND_CPU'}", "")
    for gpu in chosen.gpus:
        yield ConfigurationLine(f"  gpus: {gpu}", why.get("gpus", ""))
    yield ConfigurationLine("}", "")
    if runs_streams:
        yield ConfigurationLine("parameters {", "")
        yield ConfigurationLine(f'  key: "{STREAMS_PARAMETER}"', "")
        yield ConfigurationLine(f'  value {{ string_value: "{chosen.instances}" }}', instances)
        yield ConfigurationLine("}", "")
    for name, value in _set_by_policy(benchmark.options):
        yield ConfigurationLine(f"# {name} = {value}", _BY_POLICY)


def _batching_lines(benchmark: Benchmark) -> Iterator[ConfigurationLine]:
    chosen, why = benchmark.chosen, benchmark.reasons
    if chosen is None or not chosen.dynamic_batching:
        return
    yield ConfigurationLine("dynamic_batching {", why.get("dynamic_batching", ""))
    for size in sorted(set(chosen.preferred_batch_sizes)):
        reason = why.get("preferred_batch_sizes", "")
        yield ConfigurationLine(f"  preferred_batch_size: {size}", reason)
    yield ConfigurationLine(
        f"  max_queue_delay_microseconds: {chosen.max_queue_delay_us}",
        why.get("max_queue_delay_us", ""),
    )
    yield ConfigurationLine("}", "")


def _set_by_policy(options: ServingOptions) -> Iterator[tuple[str, object]]:
    """Options that are not Triton's default, by their key in the policy."""
    defaults = ServingOptions()
    for name, value in options:
        if value != getattr(defaults, name):
            yield name, list(value) if isinstance(value, tuple) else value


def _on_gpu(scorecard: Scorecard, benchmark: Benchmark) -> bool:
    """Whether instances were on GPUs, by what the measurement or the engine's own run saw."""
    if benchmark.chosen is not None and benchmark.chosen.gpus:
        return True
    if benchmark.gpu_bytes is not None:
        return True
    speed = scorecard.engine_speed(benchmark.candidate)
    return speed is not None and not speed.device.startswith(_ON_CPU)


def _host(scorecard: Scorecard) -> Iterator[HostFact]:
    servers = dict.fromkeys(benchmark.server for benchmark in scorecard.benchmarks)
    if servers:
        yield HostFact("server", ", ".join(servers))
    devices = dict.fromkeys(f"{speed.device}" for speed in scorecard.engine_speeds if speed.device)
    if devices:
        yield HostFact("engines alone ran on", ", ".join(devices))
    for name, value in sorted(scorecard.environment.items()):
        yield HostFact(name, value)
