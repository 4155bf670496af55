"""The winner's ``config.pbtxt`` for people: each line that was chosen says what chose it."""

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

from enginegate.benchmark.deployment import ServedModel
from enginegate.candidate import Engine
from enginegate.engines import serving
from enginegate.evidence import Benchmark
from enginegate.serving import STREAMS_PARAMETER
from enginegate.triton.config import Config, config_text

_WIDTH = 100
# Field of a serving configuration -> where it stands in the file.
_PLACES: Mapping[str, tuple[str, ...]] = {
    "max_batch_size": ("max_batch_size",),
    "dynamic_batching": ("dynamic_batching",),
    "max_queue_delay_us": ("dynamic_batching", "max_queue_delay_microseconds"),
    "preferred_batch_sizes": ("dynamic_batching", "preferred_batch_size"),
    "instances": ("instance_group", "count"),
    "gpus": ("instance_group", "gpus"),
}
_PARAMETERS = ("parameters",)
# Of our runner on a GPU: its instances are streams, and a parameter says how many.
_RUNNER_PLACES: Mapping[str, tuple[str, ...]] = {
    **_PLACES,
    "instances": _PARAMETERS,
    "processes": ("instance_group", "count"),
}
# Where lines stand that follow from those that were chosen, and from the engine.
_FOLLOWING: Mapping[tuple[str, ...], str] = {
    ("optimization", "graph"): "The level at which the engine was validated.",
    ("optimization", "execution_accelerators"): "As the engine was validated.",
    ("optimization", "cuda", "graph_spec"): (
        "A batch of one of these sizes runs as one CUDA graph; another one runs without."
    ),
    ("model_warmup",): "Run before a version counts as ready, so that no request pays for it.",
}


def measured_config(
    name: str, engine: Engine, folder: Path, measured: Benchmark, *, model_uri: str
) -> str:
    """The configuration that a benchmark measured, with its reasons; empty where none was chosen.

    It is made by what served the engine then, in the backend that it was measured in.

    Args:
        name: the model's in Triton.
        engine: what was measured.
        folder: of the engine in the store.
        measured: what came out.
        model_uri: of the model that the engine was made from.

    Raises:
        TamperedError: the engine's file is not the one that was recorded.
        ModelError: the engine cannot be served in that backend.
    """
    if measured.chosen is None:
        return ""
    served = serving(engine, folder, backend=measured.backend)
    return annotated_config(
        ServedModel.of(name, engine, served).config(measured.chosen, measured.options),
        measured.reasons,
        origin=f"{measured.candidate} of {model_uri}, measured on {measured.server}.",
    )


def annotated_config(config: Config, reasons: Mapping[str, str], *, origin: str = "") -> str:
    """The text of a configuration with comments; reading it back gives the same configuration.

    Args:
        config: what is served.
        reasons: field of `ServingConfig` -> the measurements that chose its value. A field whose
            value is Triton's default has no line; its reason stands above the block it belongs to.
        origin: said first, e.g. what was measured, where and when.
    """
    text = config_text(config)
    places = [place for _, place in _lines(text)]
    known = _RUNNER_PLACES if config.streams else _PLACES
    waiting: dict[tuple[str, ...], list[str]] = {
        _home(known.get(name, ()), places): [] for name in reasons
    }
    for name, reason in reasons.items():
        place = known.get(name, ())
        why = f"{STREAMS_PARAMETER}: {reason}" if place == _PARAMETERS else reason
        said = why if place in places else f"{(place or (name,))[-1]} is Triton's default: {why}"
        waiting[_home(place, places)].append(said)
    for place, why in _FOLLOWING.items():
        if place in places:
            waiting.setdefault(place, []).append(why)
    head = [origin] if origin else []
    head += waiting.pop((), [])
    head.append("Lines without a comment follow from the model and from [serving] in the policy.")
    out = list(_comment(head, indent=""))
    for line, place in _lines(text):
        indent = line[: len(line) - len(line.lstrip())]
        out += [*_comment(waiting.pop(place, []), indent=indent), line]
    return "\n".join(out) + "\n"


def _home(place: tuple[str, ...], places: list[tuple[str, ...]]) -> tuple[str, ...]:
    """Where a field's comment goes: its own line, else its block, else the top."""
    while place and place not in places:
        place = place[:-1]
    return place


def _lines(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each line with its path of keys; a closing brace has none."""
    blocks: list[str] = []
    for line in text.splitlines():
        said = line.strip()
        if said == "}":
            blocks.pop()
            yield line, ("}",)
        elif said.endswith(" {"):
            blocks.append(said.removesuffix(" {"))
            yield line, tuple(blocks)
        else:
            yield line, (*blocks, said.partition(":")[0])


def _comment(sentences: list[str], *, indent: str) -> Iterator[str]:
    for sentence in sentences:
        lead = f"{indent}# "
        plain = " ".join(sentence.split())
        yield from textwrap.wrap(
            plain, _WIDTH, initial_indent=lead, subsequent_indent=lead, break_on_hyphens=False
        )
