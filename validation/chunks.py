"""Running models over data of any size: a chunk at a time, each kept on disk when it is done.

Of a chunk only small columns are kept: one number a sample and measurement, never the candidate's
outputs. FP32's outputs are kept beside them, because running FP32 again for every candidate costs
more than reading them back. A chunk that is on disk is not run again, so a killed run goes on where
it was. What is here knows nothing of threads or processes; a chunk can be pickled and run anywhere.
"""

import io
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar
from uuid import uuid4
from zipfile import BadZipFile

import numpy as np

from enginegate.atomic_io import new_folder, write_file
from enginegate.candidate import Engine, OnnxModel
from enginegate.content_store import ContentFolder
from enginegate.data import Array, DataSet, Tensors
from enginegate.engines import Runner, open_engine, open_reference
from validation.agreement import OutputComparison, compare, concatenate_comparisons
from validation.outputs import OutputSpec
from validation.score import GALLERY, labels_by_measure

T = TypeVar("T")

_log = logging.getLogger("enginegate.validate")
_TOLD_EVERY_S = 2.0
# Samples from which all columns, some 150 bytes each, are felt in memory: 300 MB.
_ON_DISK_FROM = 2_000_000
_FIRST_ROWS = 8  # enough to see how large outputs are
_BLOCK_BYTES = 64 << 20  # of FP32's outputs; comparing them takes some twenty times as much
_FROM_DATA = frozenset({"scope", "ids", "slices", "task", "labels"})
_MAPPINGS = frozenset({"scores", "own", "traits"})


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some consecutive samples, and what is asked about them.

    Attributes:
        data: these samples only.
        start: the place of the first in the whole data.
        scope: which data it is, e.g. evaluation.
        asked: one question for each output that is compared.
        onnx: the FP32 model.
        outputs: folder of FP32's outputs on this data.
    """

    data: DataSet
    start: int
    scope: str
    asked: tuple[OutputSpec, ...]
    onnx: ContentFolder[OnnxModel]
    outputs: Path

    @property
    def name(self) -> str:
        """For example ``00016384-00032768``; sorts in data order."""
        return f"{self.start:010d}-{self.start + len(self.data):010d}"


def chunks_of(whole: DataSet, size: int, make: Callable[[DataSet, int], Chunk]) -> list[Chunk]:
    """The data in chunks of ``size`` samples, rounded up so that ranked samples stay together."""
    step = -(-size // GALLERY) * GALLERY
    return [make(whole.rows(at, at + step), at) for at in range(0, len(whole), step)]


def observe_chunk(chunk: Chunk, noise: Path) -> None:
    """Run FP32 once to compare candidates with, and once more to know its own noise.

    Args:
        noise: folder of the columns that compare the second run with the first.
    """
    kept = chunk.outputs / chunk.name
    if kept.is_dir() and _is_kept(noise, chunk):
        return
    with open_reference(chunk.onnx.value, chunk.onnx.folder) as runner:
        if not kept.is_dir():
            _keep_outputs(kept, chunk, runner.run)
        _keep_columns(noise, chunk, runner.run)


def compare_chunk(chunk: Chunk, engine: ContentFolder[Engine], folder: Path) -> None:
    """Run a candidate and keep the columns that compare it with FP32.

    Raises:
        EnginegateError: the engine broke, or its outputs are not the model's.
    """
    with open_comparison(engine) as compare_on:
        compare_on(chunk, folder)


@contextmanager
def open_comparison(engine: ContentFolder[Engine]) -> Iterator[Callable[[Chunk, Path], None]]:
    """`compare_chunk` for one chunk after another.

    The engine is opened once, for the first chunk that is not kept: on a GPU that takes seconds,
    for each of its batch sizes is warmed up and its graph captured.
    """
    with ExitStack() as stack:
        opened: list[Runner] = []

        def compare_on(chunk: Chunk, folder: Path) -> None:
            if _is_kept(folder, chunk):
                return
            if not opened:
                opened.append(stack.enter_context(open_engine(engine.value, engine.folder)))
            _keep_columns(folder, chunk, opened[0].run)

        yield compare_on


def gather(
    folder: Path, chunks: Iterable[Chunk], whole: DataSet, question: int
) -> OutputComparison:
    """All chunks' columns as one comparison of the whole data, for one of the questions."""
    every = list(chunks)
    first, paths = every[0], [_path(folder, chunk, question) for chunk in every]
    joined: dict[str, Array | None] = {
        name: _joined(paths, name) for name in _read_columns(paths[0])
    }
    asked = first.asked[question]
    labels = labels_by_measure(whole, asked.output or _output_names(first)[0], asked)
    return _comparison(joined, whole, first.scope, asked, labels)


def followed(done: Iterable[T], count: int, what: str) -> Iterator[T]:
    """The same, telling the log how far it is and how long it may take; silent if that is short."""
    started = told = time.monotonic()
    for number, item in enumerate(done, start=1):
        yield item
        now = time.monotonic()
        if now - told > _TOLD_EVERY_S and number < count:
            told, left = now, (now - started) / number * (count - number)
            _log.info("%s: %d of %d chunks, about %.0f s left", what, number, count, left)


def _keep_outputs(folder: Path, chunk: Chunk, run: Callable[[Tensors], Tensors]) -> None:
    with new_folder(folder) as staging:
        files: dict[str, Array] = {}
        start, count = 0, _FIRST_ROWS
        while start < len(chunk.data):
            rows = chunk.data.rows(start, start + count)
            answers = run(dict(rows.inputs))
            for name, values in answers.items():
                if name not in files:
                    shape = (len(chunk.data), *values.shape[1:])
                    place = staging / f"{len(files)}.{name.replace('/', '_')}.npy"
                    files[name] = np.lib.format.open_memmap(
                        place, mode="w+", dtype=values.dtype, shape=shape
                    )
                files[name][start : start + len(rows)] = values
            start, count = start + len(rows), _rows_at_a_time(answers)
        write_file(staging / "names.txt", "\n".join(files).encode())


def _kept_outputs(chunk: Chunk) -> Tensors:
    """FP32's outputs on a chunk, memory-mapped, in the model's order."""
    folder = chunk.outputs / chunk.name
    return {
        name: np.load(next(folder.glob(f"{place}.*.npy")), mmap_mode="r")
        for place, name in enumerate(_output_names(chunk))
    }


def _output_names(chunk: Chunk) -> list[str]:
    """Of FP32's kept outputs, in the model's order."""
    return (chunk.outputs / chunk.name / "names.txt").read_text().split("\n")


def _keep_columns(folder: Path, chunk: Chunk, run: Callable[[Tensors], Tensors]) -> None:
    """Run, compare and forget a few samples at a time; then write what is left of them."""
    reference = _kept_outputs(chunk)
    parts: list[list[OutputComparison]] = [[] for _ in chunk.asked]
    for start, rows in _blocks(chunk, reference):
        expected = {n: np.asarray(a[start : start + len(rows)]) for n, a in reference.items()}
        found = run(dict(rows.inputs))
        for place, asked in enumerate(chunk.asked):
            parts[place].append(compare(expected, found, rows, chunk.scope, asked=asked))
    for place, compared in enumerate(parts):
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **_columns(concatenate_comparisons(compared)))
        write_file(_path(folder, chunk, place), buffer.getvalue())


def _blocks(chunk: Chunk, reference: Tensors) -> Iterator[tuple[int, DataSet]]:
    """So few samples at a time that their outputs fit into memory several times over."""
    ranked = any(m.kind == "recall" for asked in chunk.asked for m in asked.metrics.values())
    step = GALLERY if ranked else _rows_at_a_time(reference)
    for start in range(0, len(chunk.data), step):
        yield start, chunk.data.rows(start, start + step)


def _rows_at_a_time(outputs: Tensors) -> int:
    """Pixels of a few images may be as many numbers as the logits of a thousand."""
    sample_bytes = sum(array.nbytes // max(1, len(array)) for array in outputs.values())
    return max(1, min(GALLERY, _BLOCK_BYTES // max(1, sample_bytes)))


def _is_kept(folder: Path, chunk: Chunk) -> bool:
    try:
        for place in range(len(chunk.asked)):
            _read_columns(_path(folder, chunk, place))
    except (OSError, ValueError, EOFError, BadZipFile, KeyError):
        return False  # missing, cut short or damaged: it is made again
    return True


def _path(folder: Path, chunk: Chunk, question: int) -> Path:
    return folder / f"{chunk.name}.{question}.npz"


def _read_columns(path: Path) -> dict[str, Array]:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _joined(paths: Sequence[Path], name: str) -> Array:
    """One column of all chunks; of many samples in a file that has no name any more.

    The system takes the pages of such a file back when memory is short.
    """

    def part(path: Path) -> Array:
        with np.load(path, allow_pickle=False) as archive:
            return np.asarray(archive[name])

    whole = np.concatenate([part(path) for path in paths])
    if len(whole) < _ON_DISK_FROM:
        return whole
    file = paths[0].parent / f".{uuid4().hex}"
    mapped = np.memmap(file, dtype=whole.dtype, mode="w+", shape=whole.shape)
    file.unlink()
    mapped[:] = whole
    return mapped


def _columns(comparison: OutputComparison) -> dict[str, Array]:
    """Everything that does not come from the data again."""
    found: dict[str, Array] = {}
    for name in (each.name for each in fields(OutputComparison) if each.name not in _FROM_DATA):
        value = getattr(comparison, name)
        if name in _MAPPINGS:
            found |= {f"{name}.{key}": column for key, column in value.items()}
        elif value is not None:
            found[name] = value
    return found


def _comparison(
    columns: Mapping[str, Array | None],
    whole: DataSet,
    scope: str,
    asked: OutputSpec,
    labels: Mapping[str, Array],
) -> OutputComparison:
    plain = {
        each.name: columns.get(each.name)
        for each in fields(OutputComparison)
        if each.name not in _FROM_DATA | _MAPPINGS
    }
    mappings = {
        mapping: {
            name.partition(".")[2]: column
            for name, column in columns.items()
            if name.startswith(f"{mapping}.")
        }
        for mapping in _MAPPINGS
    }
    return OutputComparison(
        scope=asked.scope(scope),
        ids=whole.ids,
        slices=whole.slices,
        task=asked.task,
        labels=labels,
        **plain,  # type: ignore[arg-type]
        **mappings,  # type: ignore[arg-type]
    )
