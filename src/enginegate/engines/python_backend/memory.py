"""Tensors in a GPU's memory and in pinned memory of the host, and how requests are joined there.

Triton's Python backend runs this same file beside its model file; therefore it needs NumPy only,
and imports nothing of this package but what is copied with it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Arrays: TypeAlias = dict[str, NDArray[Any]]
Shapes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
Place: TypeAlias = Callable[[str, Sequence[int], Any], int]


class Memory(NamedTuple):
    """A tensor in device memory, rows first and without gaps.

    Attributes:
        address: where it begins.
        shape: with the batch axis in front.
        dtype: NumPy's name of its type.
        owner: kept for as long as the memory must be.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    owner: Any = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


class DeviceBuffers:
    """Device memory by tensor, as large as the largest shape it was asked for."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._places: dict[str, tuple[int, int]] = {}

    def place(self, name: str, shape: Sequence[int], dtype: Any) -> int:
        """Address of memory for a tensor; what is there is lost when it must be larger."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        address, has = self._places.get(name, (0, -1))
        if size > has:
            if has >= 0:
                del self._places[name]  # there may be no memory for a larger one
                self._device.free(address)
            address = self._device.allocate(size)
            self._places[name] = (address, size)
        return address

    def memory(self, name: str, shape: Sequence[int], dtype: Any) -> Memory:
        """A tensor at the place of its name."""
        named = np.dtype(dtype).name
        return Memory(self.place(name, shape, dtype), tuple(int(axis) for axis in shape), named)

    def address(self, name: str) -> int:
        """Where a tensor is that was placed before."""
        return self._places[name][0]

    def free(self) -> None:
        """Give everything back."""
        for address, _ in self._places.values():
            self._device.free(address)
        self._places.clear()


class HostBuffers:
    """Pinned memory by tensor, as large as the largest shape it was asked for."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._memory: Arrays = {}

    def array(self, name: str, shape: Sequence[int], dtype: Any) -> NDArray[Any]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if name not in self._memory or len(self._memory[name]) < size:
            if name in self._memory:  # there may be no memory for a larger one
                self._device.free_pinned(self._memory.pop(name))
            self._memory[name] = self._device.pinned(size)
        found: NDArray[Any] = self._memory[name][:size].view(dtype).reshape(shape)
        return found


class Requests:
    """Requests that run together, padded to a bucket.

    Args:
        parts: inputs of each request by name: arrays, or tensors in device memory; alike in every
            axis but the first.
        size: of the bucket.

    Attributes:
        ends: rows up to the end of each request.
        shapes: of the joined inputs, by name.
    """

    def __init__(self, parts: Sequence[Mapping[str, Any]], size: int) -> None:
        self.parts = parts
        self.ends: list[int] = []
        self.rows = 0
        for part in parts:
            self.rows += request_rows(part)
            self.ends.append(self.rows)
        self.shapes: Shapes = tuple(
            (name, (size, *part.shape[1:])) for name, part in sorted(parts[0].items())
        )

    def gather_device(self, stream: Any, place: Place) -> None:
        """Copy what requests have in device memory; returns when Triton may take it back.

        Args:
            stream: queues the copies.
            place: address for the joined input of that name, shape and dtype.
        """
        copied = False
        for name, shape in self.shapes:
            start = 0
            for part, end in zip(self.parts, self.ends, strict=True):
                tensor = part[name]
                if not isinstance(tensor, np.ndarray):
                    bytes_a_row = row_bytes(shape, tensor.dtype)
                    target = place(name, shape, tensor.dtype)
                    stream.copy(
                        target + start * bytes_a_row, tensor.address, (end - start) * bytes_a_row
                    )
                    copied = True
                start = end
        if copied:
            stream.wait()

    def gather_host(self, stream: Any, host: HostBuffers, place: Place) -> None:
        """Join and pad what is in host memory in pinned memory, and queue its upload."""
        for name, shape in self.shapes:
            tensors = [part[name] for part in self.parts]
            dtype = tensors[0].dtype
            address = place(name, shape, dtype)
            on_host = [isinstance(tensor, np.ndarray) for tensor in tensors]
            if all(on_host):
                joined = host.array(name, shape, dtype)
                np.concatenate(tensors, out=joined[: self.rows], casting="no")
                joined[self.rows :] = joined[self.rows - 1]
                stream.upload(address, joined)
                continue
            if any(on_host):
                self._upload_each(stream, host.array(name, shape, dtype), tensors, address)
            self._pad(stream, address, shape, dtype)

    def _upload_each(
        self, stream: Any, joined: NDArray[Any], tensors: Sequence[Any], address: int
    ) -> None:
        """Upload those that are in host memory, between the others."""
        start = 0
        for tensor, end in zip(tensors, self.ends, strict=True):
            if isinstance(tensor, np.ndarray):
                joined[start:end] = tensor
                offset = start * row_bytes(joined.shape, joined.dtype)
                stream.upload(address + offset, joined[start:end])
            start = end

    def _pad(self, stream: Any, address: int, shape: tuple[int, ...], dtype: Any) -> None:
        """Repeat the last row: a real row costs no Inf, NaN or index out of range."""
        bytes_a_row, start = row_bytes(shape, dtype), self.rows - 1
        filled = self.rows
        while filled < shape[0]:
            more = min(filled - start, shape[0] - filled)
            source, target = address + start * bytes_a_row, address + filled * bytes_a_row
            stream.copy(target, source, more * bytes_a_row)
            filled += more


def bucket_for(buckets: Sequence[int], rows: int) -> int:
    """The smallest bucket that has so many rows."""
    return next(bucket for bucket in buckets if bucket >= rows)


def request_rows(part: Mapping[str, Any]) -> int:
    """Rows of one request."""
    return int(part[next(iter(part))].shape[0])


def row_bytes(shape: Sequence[int], dtype: Any) -> int:
    """Bytes of one row of a tensor."""
    return int(np.prod(shape[1:])) * int(np.dtype(dtype).itemsize)
