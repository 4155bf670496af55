"""Running a package with PyTorch: on a GPU, fixed buffers and one captured graph a bucket.

Rows are padded to the next bucket, so that a graph captured once serves every size below. Triton's
Python backend runs this same file beside its model file; therefore it needs NumPy and PyTorch only,
and imports nothing of this package. Opening a package loads native code: whoever opens one has
checked its digest.
"""

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Arrays: TypeAlias = Mapping[str, NDArray[Any]]
Launch: TypeAlias = Callable[[], Sequence["torch.Tensor"]]

_KEPT_SHAPES = 64  # least recently used ones give their buffers back
_SETTLING_RUNS = 3  # libraries choose kernels and allocate in the first; two more show no change


def open_calls(path: Path, buckets: Sequence[int], *, own: bool, device_id: int) -> "Calls":
    """What computes a batch, for each bucket.

    Args:
        path: the package.
        buckets: batch sizes that run.
        own: whether each bucket has a package of its own in the archive.
        device_id: the GPU; -1 for a CPU.

    Raises:
        RuntimeError: this PyTorch cannot load it.
    """
    import torch._inductor.package as packages  # noqa: PLC0415

    archive: Any = packages
    # Read once by the package's code, at its first run: a batch that is too large is then refused.
    os.environ.setdefault("AOTI_RUNTIME_CHECK_INPUTS", "1")

    def opened(name: str) -> Callable[..., Any]:
        # With one runner at a time there are no events between runs, which a graph cannot hold.
        loaded: Callable[..., Any] = archive.load_package(
            str(path), name, run_single_threaded=True, device_index=device_id
        )
        return loaded

    if own:
        return {bucket: opened(f"batch{bucket}") for bucket in buckets}
    return dict.fromkeys(buckets, opened("model"))


Calls: TypeAlias = Mapping[int, Callable[..., Any]]


class _Slot:
    """Device tensors of one set of shapes, and what runs on them.

    Attributes:
        inputs: tensors to fill.
        outputs: tensors that the last launch filled.
        launch: queues one run.
        captured: whether that is one graph.
    """

    def __init__(self, inputs: Sequence["torch.Tensor"], launch: Launch, *, captured: bool) -> None:
        self.inputs, self._launch, self.captured = inputs, launch, captured
        self.outputs: Sequence[torch.Tensor] = ()

    def launch(self) -> None:
        self.outputs = self._launch()


class BucketedPackage:
    """Calls of a package, or of an eager module, with the rows padded to buckets.

    Attributes:
        graph_refusal: why a graph could not be captured; empty if none was refused.
    """

    def __init__(
        self,
        calls: Calls,
        *,
        inputs: Sequence[str],
        outputs: Sequence[str],
        device_id: int = -1,
        graphs: bool = False,
        tf32: bool = False,
    ) -> None:
        """Nothing runs yet.

        Args:
            calls: by bucket, ascending; tensors in, a sequence of tensors out.
            inputs: names, in the order of the call's arguments.
            outputs: names, in the order of its results; empty: their numbers.
            device_id: the GPU; -1 for a CPU.
            graphs: whether to capture CUDA graphs.
            tf32: whether float32 is multiplied in TF32.
        """
        import torch  # noqa: PLC0415

        gpu: Any = torch.cuda
        self.buckets = tuple(calls)
        self.graph_refusal = ""
        self._calls, self._inputs, self._outputs = calls, tuple(inputs), tuple(outputs)
        self._graphs, self._tf32 = graphs and device_id >= 0, tf32
        self._device = torch.device("cpu" if device_id < 0 else f"cuda:{device_id}")
        self._stream = None if device_id < 0 else gpu.Stream(self._device)
        self._slots: OrderedDict[tuple[tuple[int, ...], ...], _Slot] = OrderedDict()

    def run(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """Outputs by name, for at most the largest bucket of rows."""
        rows = len(next(iter(arrays.values())))
        bucket = next(size for size in self.buckets if size >= rows)
        padded = {name: _padded(arrays[name], bucket) for name in self._inputs}
        with self._computing():
            if self._stream is None:
                found = self._calls[bucket](*map(_tensor, padded.values()))
            else:
                slot = self._filled(bucket, padded)
                slot.launch()
                found = slot.outputs
            answers = [tensor[:rows].cpu().numpy() for tensor in found]
        if self._stream is None:  # results may be views of one another, or of the inputs
            answers = [answer.copy() for answer in answers]
        return dict(zip(self._outputs or map(str, range(len(answers))), answers, strict=True))

    @contextmanager
    def bound(self, arrays: Arrays) -> Iterator[Callable[[int], float]]:
        """Inputs where the package computes; gives ``repeat(count)``: seconds for so many runs.

        Rows must be a bucket's, so that nothing of the time is padding.
        """
        bucket = len(next(iter(arrays.values())))
        if bucket not in self.buckets:
            bucket = next(size for size in self.buckets if size >= bucket)
        padded = {name: _padded(arrays[name], bucket) for name in self._inputs}
        with self._computing():
            launch: Callable[[], object]
            if self._stream is None:
                tensors = [*map(_tensor, padded.values())]
                call = self._calls[bucket]
                launch = lambda: call(*tensors)  # noqa: E731
            else:
                launch = self._filled(bucket, padded).launch

            def repeat(count: int) -> float:
                with self._computing():
                    self._wait()
                    start = time.perf_counter()
                    for _ in range(count):
                        launch()
                    self._wait()
                    return time.perf_counter() - start

            yield repeat

    def warm_up(self, examples: Arrays) -> None:
        """Run every bucket, from one row of each input."""
        for bucket in reversed(self.buckets):  # the largest first: the rest fits what it leaves
            self.run({name: np.repeat(row[:1], bucket, axis=0) for name, row in examples.items()})

    def _filled(self, bucket: int, arrays: Arrays) -> _Slot:
        key = tuple(arrays[name].shape for name in self._inputs)
        slot = self._slots.pop(key, None) or self._slot(bucket, arrays)
        self._slots[key] = slot
        if len(self._slots) > _KEPT_SHAPES:
            self._slots.popitem(last=False)
        for tensor, array in zip(slot.inputs, arrays.values(), strict=True):
            tensor.copy_(_tensor(array), non_blocking=True)
        return slot

    def _slot(self, bucket: int, arrays: Arrays) -> _Slot:
        import torch  # noqa: PLC0415

        inputs = [_tensor(array).to(self._device) for array in arrays.values()]
        call = self._calls[bucket]

        def direct() -> Sequence[torch.Tensor]:
            results: Sequence[torch.Tensor] = call(*inputs)
            return results

        for _ in range(_SETTLING_RUNS):
            direct()
        self._wait()
        if not self._graphs:
            return _Slot(inputs, direct, captured=False)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads of this process may use the device meanwhile.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                outputs = direct()
        except RuntimeError as error:
            self.graph_refusal, self._graphs = str(error).partition("\n")[0], False
            self._wait()
            return _Slot(inputs, direct, captured=False)

        def replay() -> Sequence[torch.Tensor]:
            graph.replay()
            return outputs

        return _Slot(inputs, replay, captured=True)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """On this package's stream, without gradients, with the switches of its precision."""
        import torch  # noqa: PLC0415

        switches: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.cudnn
        before = [switch.allow_tf32 for switch in switches]
        threads = torch.get_num_threads()
        try:
            for switch in switches:
                switch.allow_tf32 = self._tf32
            if self._stream is None and threads != 1:
                torch.set_num_threads(1)  # throughput comes from instances
            with torch.no_grad(), torch.cuda.stream(self._stream):
                yield
        finally:
            for switch, setting in zip(switches, before, strict=True):
                switch.allow_tf32 = setting
            if self._stream is None and threads != 1:
                torch.set_num_threads(threads)

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _padded(array: NDArray[Any], rows: int) -> NDArray[Any]:
    """The array with its last row repeated; a real row costs no Inf, NaN or index out of range."""
    if len(array) == rows:
        return np.ascontiguousarray(array)
    return np.concatenate([array, np.repeat(array[-1:], rows - len(array), axis=0)])


def _tensor(array: NDArray[Any]) -> "torch.Tensor":
    import torch  # noqa: PLC0415

    return torch.from_numpy(array if array.flags.writeable else array.copy())
