"""Every form of a source on its way to ONNX in the store: opened, then exported."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

from enginegate.candidate import Sha256
from enginegate.data import DataSet, Tensors
from enginegate.errors import ModelError
from enginegate.records import canonical_json, sha256_bytes, sha256_file

Framework: TypeAlias = Callable[[Tensors], Tensors]

# The first in which every common operator takes bfloat16; it has FP8 Quantize/Dequantize.
OPSET = 22


@dataclass(frozen=True, slots=True)
class SavedProgram:
    """A torch.export program as it was saved.

    Attributes:
        inputs: names, in the order of its arguments.
        outputs: names, in the order of its results.
        run: answers by the saved file, read back.
    """

    path: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    run: Framework


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """ONNX as it comes, its weights inside or in files beside it.

    Attributes:
        framework: the model's own answers, to compare with; None if the source is ONNX itself.
        logarithms: outputs that are logarithms of probabilities, and compared as such.
        program: the model as a torch.export program, where it is one of PyTorch's.
        no_program: why there is none.
        one_sample: the ONNX file that the source is, where it takes one sample at a time only: its
            answers, one after the other, are the framework's.
    """

    path: Path
    framework: Framework | None = None
    logarithms: frozenset[str] = frozenset()
    program: SavedProgram | None = None
    no_program: str = "the source is no PyTorch model"
    one_sample: Path | None = None


@dataclass(frozen=True, slots=True)
class OpenedSource:
    """A source whose files are here, checked to be allowed, and not yet run.

    Attributes:
        uri: what it is, with aliases resolved.
        sha256: digest of everything of it that decides what it computes.
        exporter: what makes the ONNX, with versions.
        convert: makes it, into a scratch folder, for inputs like those of the data.
        options: what else decides the bytes, e.g. names that outputs are given.
    """

    uri: str
    sha256: Sha256
    exporter: str
    convert: Callable[[DataSet, Path], ExportedModel]
    options: Mapping[str, object] = field(default_factory=dict)


def digest_of(files: Iterable[Path], folder: Path) -> Sha256:
    """Digest of names below ``folder`` and content of files."""
    named = {file.relative_to(folder).as_posix(): sha256_file(file) for file in files}
    return sha256_bytes(canonical_json(named))


def exporter_versions(kind: str, extras: Mapping[str, str]) -> str:
    """Versions and options that decide the exported bytes; importing the libraries takes seconds.

    Args:
        kind: the framework, for the message.
        extras: the libraries, and the extra of this package that installs each.
    """
    try:
        versions = [f"{name} {metadata.version(name)}" for name in extras]
    except metadata.PackageNotFoundError as error:
        raise ModelError(
            f"A {kind} model needs {error.name}, which is not installed here. "
            f"Run: pip install 'enginegate[{extras[str(error.name)]}]'"
        ) from error
    return f"{', '.join(versions)}, opset {OPSET}"
