"""Sets of samples, and their own form: one ``.npz``, or a folder of ``.npy`` for large sets.

`enginegate.data_sources` reads the other forms.

Arrays by name: ``input.NAME`` (one for each model input, first axis the sample), optional
``label`` (integer classes), ``label.OUTPUT`` (classes, numbers or vectors, of one output),
``slice.COLUMN`` (text or integers) and ``id`` (text). Pickled arrays are refused.
A folder's arrays are memory-mapped, so a set may be larger than memory.

A small archive can hold more than this machine: one is unpacked up to what is free in memory now,
and refused from a gibibyte on if it expands as no honest data does. ENGINEGATE_MAX_ARCHIVE_GIB sets
another limit, instead of both.
"""

import hashlib
import io
import math
import os
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo, is_zipfile

import numpy as np
from numpy.typing import NDArray

from enginegate.atomic_io import write_file
from enginegate.candidate import TensorSpec
from enginegate.errors import DataError, InputError
from enginegate.machine import free_memory

Array: TypeAlias = NDArray[Any]
Tensors: TypeAlias = dict[str, Array]

_BLOCK_ROWS, _BLOCK_BYTES = 4096, 4 << 20
_UNREADABLE = (OSError, ValueError, TypeError, BadZipFile, EOFError, zlib.error)
# Version 3 is for names of fields in other alphabets; what it holds is checked when it is read.
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


@dataclass(frozen=True, slots=True)
class DataSet:
    """N samples, in a fixed order. Arrays must not be written to.

    Attributes:
        origin: the path it was read from, for messages.
        inputs: by input name, shape ``(N, ...)``.
        labels: shape ``(N,)``, int64 class indices, or None.
        ids: shape ``(N,)``, text, unique within the set.
        slices: by column name, shape ``(N,)``, text.
        targets: labels of single outputs by the output's name, shape ``(N, ...)``, finite; under
            the empty name those of a model's only output, where they are no class a sample.
    """

    origin: str
    inputs: Mapping[str, Array]
    labels: NDArray[np.int64] | None
    ids: NDArray[np.str_]
    slices: Mapping[str, NDArray[np.str_]]
    targets: Mapping[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def sha256(self) -> str:
        """Digest of every array's name, type, shape and values; read in blocks of rows."""
        digest = hashlib.sha256()
        for name, array in sorted(self.arrays().items()):
            digest.update(f"{name}|{array.dtype.str}|{array.shape}".encode())
            for _, block in blocks_of(array):
                digest.update(np.ascontiguousarray(block).tobytes())
        return digest.hexdigest()

    def batches(self, size: int) -> Iterator[Tensors]:
        """Inputs of ``size`` samples at a time; the last batch may be smaller."""
        for start in range(0, len(self), size):
            yield {name: array[start : start + size] for name, array in self.inputs.items()}

    def head(self, count: int) -> "DataSet":
        """The first ``count`` samples."""
        return self.rows(0, count)

    def rows(self, start: int, stop: int) -> "DataSet":
        """Samples ``start`` to ``stop``, the last not included."""
        return DataSet(
            self.origin,
            {name: array[start:stop] for name, array in self.inputs.items()},
            None if self.labels is None else self.labels[start:stop],
            self.ids[start:stop],
            {name: column[start:stop] for name, column in self.slices.items()},
            {name: array[start:stop] for name, array in self.targets.items()},
        )

    def only(self, chosen: NDArray[np.bool_]) -> "DataSet":
        """The samples where ``chosen``, shape ``(N,)``, is true, in their order; copies."""
        return DataSet(
            self.origin,
            {name: array[chosen] for name, array in self.inputs.items()},
            None if self.labels is None else self.labels[chosen],
            self.ids[chosen],
            {name: column[chosen] for name, column in self.slices.items()},
            {name: array[chosen] for name, array in self.targets.items()},
        )

    def check_fits(self, specs: tuple[TensorSpec, ...]) -> None:
        """Refuse data that a model with these inputs cannot take.

        Raises:
            DataError: an input is missing, unknown, of another dtype or shape, or holds NaN or Inf.
        """
        wanted, given = {spec.name: spec for spec in specs}, set(self.inputs)
        if given != set(wanted):
            raise DataError(
                f"{self.origin} holds inputs {sorted(given)}, the model takes {sorted(wanted)}. "
                "Name the arrays input.NAME after the model's inputs."
            )
        for name, spec in wanted.items():
            self._check_input(self.inputs[name], spec)

    def in_types(self, specs: tuple[TensorSpec, ...]) -> "DataSet":
        """These samples with integers in the types that a model takes; see `cast_integers`.

        Raises:
            DataError: a number does not fit its type.
        """
        inputs = cast_integers(self.inputs, specs, origin=self.origin)
        same = all(inputs[name] is array for name, array in self.inputs.items())
        return self if same else replace(self, inputs=inputs)

    def _check_input(self, array: Array, spec: TensorSpec) -> None:
        if array.dtype.name != spec.dtype:
            raise DataError(
                f"{self.origin}: input.{spec.name} is {array.dtype.name}, the model takes {spec}. "
                f"Convert it with array.astype({spec.dtype!r}) when writing the file."
            )
        fits = array.ndim == len(spec.shape) and all(
            axis in {-1, size} for axis, size in zip(spec.shape, array.shape, strict=True)
        )
        if not fits:
            raise DataError(
                f"{self.origin}: input.{spec.name} has shape {array.shape}, the model takes {spec}."
            )
        if np.issubdtype(array.dtype, np.floating):
            self._check_finite(f"input.{spec.name}", array)

    def _check_finite(self, name: str, array: Array) -> None:
        for start, block in blocks_of(array):
            bad = ~np.isfinite(block).reshape(len(block), -1).all(axis=1)
            if bad.any():
                first = start + int(bad.argmax())
                raise DataError(
                    f"{self.origin}: {name} holds NaN or Inf, first in sample {first} "
                    f"(id {self.ids[first]}). Remove or repair those samples."
                )

    def arrays(self) -> dict[str, Array]:
        arrays: dict[str, Array] = {f"input.{name}": a for name, a in self.inputs.items()}
        arrays |= {f"slice.{name}": column for name, column in self.slices.items()}
        arrays |= {_label_name(name): array for name, array in self.targets.items()}
        arrays["id"] = self.ids
        if self.labels is not None:
            arrays["label"] = self.labels
        return arrays


@dataclass(frozen=True, slots=True)
class DataHeader:
    """What a set's headers say, without its values.

    Attributes:
        samples: how many it holds, one or more.
        inputs: by name; the first axis is -1.
        arrays: names of all its arrays.
    """

    samples: int
    inputs: Mapping[str, TensorSpec]
    arrays: frozenset[str]


def read_header(path: Path) -> DataHeader:
    """What a data set holds, by its headers alone: quick, however large it is.

    Raises:
        DataError: it is missing, corrupt, pickled, empty, or its arrays differ in length.
    """
    return data_header(array_types(path), str(path))


def data_header(
    shapes: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]], origin: str
) -> DataHeader:
    """What arrays of these types and shapes are as a data set.

    Raises:
        DataError: there is no input or no sample, or the arrays differ in length.
    """
    _check_rows(origin, {name: shape for name, (_, shape) in shapes.items()})
    inputs = {
        name.removeprefix("input."): TensorSpec(
            name=name.removeprefix("input."), dtype=dtype.name, shape=(-1, *shape[1:])
        )
        for name, (dtype, shape) in shapes.items()
        if name.startswith("input.")
    }
    samples = next(iter(shapes.values()))[1][0]
    return DataHeader(samples, inputs, frozenset(shapes))


def read_data(path: Path) -> DataSet:
    """Read a data set from an ``.npz`` file or a folder of ``.npy`` files.

    Raises:
        DataError: it is missing, corrupt, pickled, empty, or its arrays differ in length; or a
            label is not an integer (NaN included).
    """
    return data_set(load_arrays(path), str(path))


def data_set(arrays: Mapping[str, Array], origin: str) -> DataSet:
    """The data set of arrays by their names (docs/data.md).

    Args:
        origin: what the set is called in messages.

    Raises:
        DataError: an input is missing, arrays differ in length, there are no samples, ids repeat,
            or a label is not finite or no integer.
    """
    inputs = {
        name.removeprefix("input."): a for name, a in arrays.items() if name.startswith("input.")
    }
    count = _check_rows(origin, {name: array.shape for name, array in arrays.items()})
    ids = arrays.get("id", np.arange(count)).astype(np.str_)
    if len(np.unique(ids)) != count:
        raise DataError(f"{origin}: the array id repeats values; each sample needs its own.")
    slices = {
        name.removeprefix("slice."): array.astype(np.str_)
        for name, array in arrays.items()
        if name.startswith("slice.")
    }
    labels = _labels(arrays.get("label"))
    return DataSet(origin, inputs, labels, ids, slices, _targets(origin, arrays))


def write_data(data: DataSet, path: Path) -> None:
    """Write a data set as one ``.npz``, whole or not at all, readable by its owner only."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **data.arrays())
    write_file(path, buffer.getvalue(), mode=0o600)


def _check_rows(origin: str, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """How many samples the arrays hold; refuses a set without inputs or with uneven arrays."""
    if not any(name.startswith("input.") for name in shapes):
        raise DataError(
            f"{origin} holds no input: name arrays input.NAME (found: {sorted(shapes)})."
        )
    lengths = {name: shape[0] if shape else 0 for name, shape in shapes.items()}
    count = next(iter(lengths.values()))
    if set(lengths.values()) != {count}:
        raise DataError(
            f"{origin}: arrays differ in length: {lengths}. Each needs one row a sample."
        )
    if count == 0:
        raise DataError(f"{origin} holds no samples.")
    return count


def _labels(array: Array | None) -> NDArray[np.int64] | None:
    """Classes, one a sample; labels of any other form are `DataSet.targets`."""
    return array.astype(np.int64) if array is not None and _holds_classes(array) else None


def _holds_classes(array: Array) -> bool:
    return array.ndim == 1 and np.issubdtype(array.dtype, np.integer)


def _targets(origin: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    targets = {n.removeprefix("label."): a for n, a in arrays.items() if n.startswith("label.")}
    if "label" in arrays and not _holds_classes(arrays["label"]):
        targets[""] = arrays["label"]
    for name, array in targets.items():
        if array.dtype.kind not in "fiub" or not _all_finite(array):
            raise DataError(
                f"{origin}: {_label_name(name)} must hold finite numbers (dtype {array.dtype}). "
                "Remove the samples without a label, or leave this array out."
            )
    return targets


def _label_name(output: str) -> str:
    return f"label.{output}" if output else "label"


def _all_finite(array: Array) -> bool:
    """By blocks of rows: labels of the outputs' shape may be larger than memory."""
    return all(np.isfinite(block).all() for _, block in blocks_of(array))


def blocks_of(array: Array) -> Iterator[tuple[int, Array]]:
    """An array's rows, so many at a time that a copy of them is small; each with its first row."""
    row_bytes = max(1, array.nbytes // max(1, len(array)))
    step = max(1, min(_BLOCK_ROWS, _BLOCK_BYTES // row_bytes))
    for start in range(0, len(array), step):
        yield start, array[start : start + step]


def array_types(path: Path) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """Type and shape of every array, from its header."""
    try:
        if path.is_dir():
            return {name: (array.dtype, array.shape) for name, array in load_arrays(path).items()}
        _check_archive(path)
        with ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(".npy")]
            return {name.removesuffix(".npy"): _header(archive, name) for name in names}
    except FileNotFoundError as error:
        raise DataError(f"There is no data at {path}. The policy's [data] names it.") from error
    except (*_UNREADABLE, RuntimeError) as error:
        raise DataError(_unreadable(path, error)) from error


def _header(archive: ZipFile, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    with archive.open(name) as file:
        version = np.lib.format.read_magic(file)
        read = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read(file)
    if dtype.hasobject:
        raise ValueError(f"{name} is pickled")
    return dtype, shape


def _unreadable(path: Path, error: Exception) -> str:
    return (
        f"{path} cannot be read as .npz or a folder of .npy: {error}. "
        "Write it with numpy.savez; pickled arrays are refused."
    )


def load_arrays(path: Path) -> dict[str, Array]:
    """Every array of an ``.npz`` file, or of a folder of ``.npy`` files (memory-mapped), by name.

    Raises:
        DataError: it is missing, corrupt, pickled, or larger than there is room for.
    """
    try:
        if path.is_dir():
            files = sorted(path.glob("*.npy"))
            return {file.stem: np.load(file, mmap_mode="r", allow_pickle=False) for file in files}
        _check_archive(path)
        # NumPy leaves a file open when it is not an archive; this one is ours to close.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError as error:
        raise DataError(f"There is no data at {path}. The policy's [data] names it.") from error
    except _UNREADABLE as error:
        raise DataError(_unreadable(path, error)) from error
    except MemoryError as error:
        raise DataError(
            f"{path} does not fit into memory: {error}. Write it as a folder of .npy files, which "
            "are not read into memory."
        ) from error


def _check_archive(path: Path) -> None:
    """Refuse an archive by what it says of itself, before any array of it is unpacked."""
    if not is_zipfile(path):
        return
    with ZipFile(path) as archive:
        why = next(archive_objections(path, archive, endings=(".npy",)), "")
        for member in () if why else archive.infolist():
            why = why or _contradiction(archive, member)
    if why:
        raise DataError(f"{path} was not read: {why}")


def _contradiction(archive: ZipFile, member: ZipInfo) -> str:
    """What an array's header says that its bytes do not bear out; empty if nothing."""
    with archive.open(member) as content:
        version = np.lib.format.read_magic(content)
        if version not in _HEADERS:
            return ""
        shape, _, dtype = _HEADERS[version](content)
        left = member.file_size - content.tell()
    claimed = math.prod(shape) * dtype.itemsize
    if dtype.hasobject or (claimed == left and dtype.itemsize):
        return ""
    return (
        f"{member.filename} says that it holds {shape} values of {dtype}, which are {claimed:,} "
        f"bytes; it has {left:,}. Write it again with numpy.savez."
    )


LIMIT_VARIABLE = "ENGINEGATE_MAX_ARCHIVE_GIB"
_GIB = 1 << 30
# Compressed masks and zeros reach a hundred; a file made to expand reaches a thousand.
_MOST_TIMES = 200
_ENCRYPTED = 1
_KINDS = {ZIP_STORED, ZIP_DEFLATED}


def archive_objections(
    path: Path, archive: ZipFile, *, endings: Collection[str] = ()
) -> Iterator[str]:
    """Why an archive is not unpacked, each reason as a sentence; nothing of it is unpacked here.

    Args:
        path: the archive's file.
        endings: what every member's name ends with; empty: any name.

    Raises:
        InputError: ENGINEGATE_MAX_ARCHIVE_GIB is not a positive number.
    """
    members = [member for member in archive.infolist() if not member.is_dir()]
    for member in members:
        if member.flag_bits & _ENCRYPTED:
            yield f"its member {member.filename!r:.80} is encrypted; write the file again without."
        elif member.compress_type not in _KINDS:
            yield (
                f"its member {member.filename!r:.80} is compressed by method "
                f"{member.compress_type}; write it uncompressed or deflated."
            )
        elif endings and not member.filename.endswith(tuple(endings)):
            yield (
                f"its member {member.filename!r:.80} does not belong there: each is called "
                f"NAME{' or NAME'.join(endings)}. Take it out."
            )
    yield from _too_large(path, members)


def _too_large(path: Path, members: Collection[ZipInfo]) -> Iterator[str]:
    total, packed = sum(member.file_size for member in members), max(1, path.stat().st_size)
    limit, free = _limit(), free_memory()
    way_out = (
        "Arrays in a folder of .npy files are not read into memory; or, if you trust the file and "
        f"there is room, set {LIMIT_VARIABLE} to the gibibytes that it may take."
    )
    if limit is not None:
        if total > limit:
            yield (
                f"it unpacks to {total / _GIB:.1f} GiB, and {LIMIT_VARIABLE} allows "
                f"{limit / _GIB:g}. {way_out}"
            )
    elif free is not None and total > free:
        yield (
            f"it unpacks to {total / _GIB:.1f} GiB, and {free / _GIB:.1f} GiB of memory are free. "
            f"{way_out}"
        )
    elif total > _GIB and total > _MOST_TIMES * packed:
        yield (
            f"it unpacks to {total / _GIB:.1f} GiB, {total // packed} times its size; more than "
            f"{_MOST_TIMES} times is no data. {way_out}"
        )


def _limit() -> float | None:
    text = os.environ.get(LIMIT_VARIABLE)
    if not text:
        return None
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not limit > 0.0:
        raise InputError(f"{LIMIT_VARIABLE} is {text!r}; it must be a number of GiB above 0.")
    return limit * _GIB


def cast_integers(
    inputs: Mapping[str, Array], specs: tuple[TensorSpec, ...], *, origin: str
) -> Tensors:
    """Inputs in the integer types that a model takes; other types are left as they are.

    An engine may take fewer bits than the model it was built from: TensorRT 8 has no INT64.

    Raises:
        DataError: a number does not fit its type; names the input and the range.
    """
    wanted = {spec.name: np.dtype(spec.dtype) for spec in specs}
    return {name: _cast(name, array, wanted.get(name), origin) for name, array in inputs.items()}


def _cast(name: str, array: Array, wanted: np.dtype[Any] | None, origin: str) -> Array:
    if wanted is None or array.dtype == wanted or not {array.dtype.kind, wanted.kind} <= {"i", "u"}:
        return array
    limits = np.iinfo(wanted)
    if array.size and (array.min() < limits.min or array.max() > limits.max):
        raise DataError(
            f"{origin}: input.{name} holds {array.min()} to {array.max()}; the engine takes "
            f"{wanted}, {limits.min} to {limits.max}. Send smaller numbers, or use an engine that "
            f"takes {array.dtype}."
        )
    return array.astype(wanted)
