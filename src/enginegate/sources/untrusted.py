"""A stranger's model is checked before it is opened: sizes, archives, and names of other places.

A model's description is what `json` or YAML makes of a file. It may name code and files outside
the model's own folder, and is refused if it does.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile, is_zipfile

from enginegate.data import archive_objections
from enginegate.errors import ModelError

_MOST_BYTES = 1 << 24  # of a description: the index of a model in a thousand files has half of it
_PLAIN = ("eager", "sdpa")
# Implementations of attention and experts that transformers has itself.
_BUILT_IN = {
    "attn_implementation": _PLAIN,
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}
_IMPLEMENTATION = re.compile(r"_*(\w*?)_*implementation(_internal)?")
_ELSEWHERE = re.compile(r"/|--|::")  # organisation/name, organisation--name
_KERNELS = frozenset({"kernel_config", "use_hub_kernels", "use_kernels"})
_OF_KERNELS = frozenset({"kernel", "kernels", "impl"})
_NO_LOSS = "the model is exported with plain operations in any case."
_QUANTISED = frozenset({"quantization_config", "compression_config"})
_FILES_OF_LOGGED = frozenset(
    {"code", "conda", "data", "env", "extra_files", "model_code_path", "model_data", "model_path"}
    | {"path", "pickled_model", "python_env", "requirements_file", "virtualenv"}
)


def read_json(path: Path, *, uri: str) -> Any:
    """The content of a JSON file of a stranger's folder.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON.
        ModelError: it is larger, or nested deeper, than any description of a model.
    """
    check_size(path, uri=uri, file=path.name, advice="Fetch it again.")
    try:
        return json.loads(path.read_text())
    except RecursionError as error:
        raise ModelError(f"{uri}: {path.name} is nested too deep. Fetch it again.") from error


def check_size(path: Path, *, uri: str, file: str, advice: str) -> None:
    """Refuse a file that is too large for a description of a model."""
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise ModelError(
            f"{uri}: {file} has {size:,} bytes; more than {_MOST_BYTES:,} is no description of a "
            f"model. {advice}"
        )


def check_archives(files: Iterable[Path], *, uri: str) -> None:
    """Refuse archives that unpack to more than there is room for; nothing of them is unpacked."""
    for file in files:
        if not (file.is_file() and is_zipfile(file)):
            continue
        try:
            with ZipFile(file) as archive:
                why = next(archive_objections(file, archive), "")
        except (BadZipFile, OSError, ValueError) as error:
            why = f"it is a damaged archive: {error}."
        if why:
            raise ModelError(f"{uri} was not opened: {file.name}: {why}")


def check_config(config: Mapping[str, Any], *, uri: str, file: str) -> None:
    """Refuse settings of transformers that fetch or run what is not in the folder.

    `auto_map` may name the folder's own code (`auto_map_classes`). That of other repositories is
    refused whatever is allowed, because a digest of the folder says nothing about them.
    """
    for key, value in _settings(config):
        why, instead = _objection(key.rpartition(".")[2], value)
        if why:
            raise ModelError(
                f"{uri} was not opened: its {file} sets {key} to {value!r:.200}, {why}. {instead}"
            )


def auto_map_classes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The Python classes that `auto_map` names, at any depth."""
    maps = [value for key, value in _settings(config) if key.rpartition(".")[2] == "auto_map"]
    return tuple(sorted({text for value in maps for text in _texts(value)} - {""}))


def check_inside(described: Any, folder: Path, *, uri: str, file: str) -> None:
    """Refuse a path of a logged model's description that leads out of the model's folder."""
    root = folder.resolve()
    for key, value in _settings(described):
        if key.rpartition(".")[2] not in _FILES_OF_LOGGED:
            continue
        for text in _texts(value, nested=False):
            if "\0" in text or not (root / text).resolve().is_relative_to(root):
                raise ModelError(
                    f"{uri} was not opened: its {file} file sets {key} to {text!r:.200}, which "
                    "leads out of the model's folder. Log the model again, so that all its files "
                    "are in its own folder."
                )


def _objection(key: str, value: Any) -> tuple[str, str]:
    """Why a setting is refused, and what to do; empty if it is not."""
    texts = [text for text in _texts(value) if text]
    elsewhere = any(map(_ELSEWHERE.search, texts))
    if key in _QUANTISED and value:
        why = "so its weights are quantised already, and opening them may fetch code"
        return why, "Give the FP32 model; candidates at other precisions are made from it."
    if key == "auto_map" and elsewhere:
        why = "which is code of another repository"
        return why, "Copy that code into the folder, and name it without a repository."
    if kind := _IMPLEMENTATION.fullmatch(key):
        built_in = _BUILT_IN.get(f"{kind[1]}_implementation", _PLAIN)
        if all(text in built_in for text in texts):
            return "", ""
        why = "a kernel of a hub or of another package, which transformers would fetch and run"
        allowed = " or ".join(map(repr, built_in))
        return why, f"Remove that line, or set it to {allowed}: {_NO_LOSS}"
    if (key in _KERNELS and value) or (_OF_KERNELS.intersection(key.split("_")) and elsewhere):
        why = "so transformers would fetch kernels of a hub and run them"
        return why, f"Remove that line: {_NO_LOSS}"
    return "", ""


def _settings(described: Any) -> Iterator[tuple[str, Any]]:
    """Every setting with its dotted name, at any depth."""
    waiting = [("", described)]
    while waiting:
        prefix, value = waiting.pop()
        if not isinstance(value, Mapping | list | tuple):
            continue
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in pairs:
            name = f"{prefix}.{key}" if prefix else str(key)
            if isinstance(value, Mapping):
                yield name, inner
            waiting.append((name, inner))


def _texts(value: Any, *, nested: bool = True) -> Iterator[str]:
    """The texts that a setting is, or holds in its list or table."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, list | tuple):
            waiting.extend(each)
        elif nested and isinstance(each, Mapping):
            waiting.extend(each.values())
