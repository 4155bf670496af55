"""Trying a package that something else compiled, in the builder's process: does it serve batches?

Its code is unknown, and was compiled for batches that nobody here chose. So it is run before
anything relies on it; whether its answers are right is judged later, like every candidate's.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from enginegate.candidate import TensorSpec
from enginegate.engines.torch_inductor.process import PackageJob
from enginegate.engines.torch_inductor.run import open_calls

if TYPE_CHECKING:
    import torch

# Differences that rounding explains, relative to the largest output. A batch axis that was fixed,
# or rows that are mixed up, are wrong by the size of the outputs themselves.
ROUNDING = {"fp32": 1e-3, "tf32": 2e-2, "fp16": 5e-2, "bf16": 2e-1}


class PackageRefusedError(Exception):
    """This cannot be compiled or run, or not trusted; the message says why."""


def try_foreign(job: PackageJob) -> dict[str, float]:
    """Run the package at its batch sizes, with rows in two orders and beside others.

    Returns:
        The largest difference by batch size, relative to the largest answer.

    Raises:
        PackageRefusedError: it does not take a size, answers other tensors than the model does, or
            a row's answer depends on the rows beside it.
    """
    fixed = job.buckets
    sizes = fixed or sorted({1, (job.max_batch_size + 1) // 2, job.max_batch_size})
    runner = open_calls(job.package, sizes, own=False, device_id=0 if job.device == "cuda" else -1)
    tried = {}
    for size in sizes:
        inputs = [_example(spec, job, size).to(job.device) for spec in job.specs]
        there = _run(runner[size], inputs, job, size)
        back = _run(runner[size], [tensor.flip(0) for tensor in inputs], job, size)
        kept = size // 2
        beside = _run(runner[size], [_with_others(tensor, kept) for tensor in inputs], job, size)
        # A mean of the batch has no order, so that only other rows show it.
        apart = {
            f"{size} rows in reverse order": max(
                share_apart(one.double(), other.flip(0).double())
                for one, other in zip(there, back, strict=True)
            ),
            f"{kept} rows beside {size - kept} others than before": max(
                share_apart(one[:kept].double(), other[:kept].double())
                for one, other in zip(there, beside, strict=True)
            ),
        }
        for how, share in apart.items():
            if not share <= ROUNDING[job.precision]:
                raise PackageRefusedError(
                    f"of {how}, answers differ by {share:.3g} of the largest: a row's "
                    "answer depends on the rows beside it. Compile it in evaluation mode, with the "
                    "first axis as the batch."
                )
        tried[str(size)] = max(apart.values())
    return tried


def _run(
    call: Any, inputs: Sequence["torch.Tensor"], job: PackageJob, size: int
) -> list["torch.Tensor"]:
    import torch  # noqa: PLC0415

    try:
        with torch.no_grad():
            answers = [*torch.utils._pytree.tree_leaves(call(*inputs))]  # noqa: SLF001
    except (RuntimeError, TypeError, ValueError) as error:
        taken = f"batch = {job.buckets[0]}" if job.buckets else "batch, if it takes one size only,"
        raise PackageRefusedError(
            f"it does not take {size} rows of {', '.join(map(str, job.specs))}: {brief(error)}. "
            f"State {taken} and the order of its inputs under [candidates] made as it was compiled."
        ) from error
    found = [(str(each.dtype).removeprefix("torch."), tuple(each.shape)) for each in answers]
    wanted = [(spec.dtype, spec.shape) for spec in job.answers]
    fits = len(found) == len(wanted) and all(
        dtype == of and _fits(shape, like, size)
        for (dtype, shape), (of, like) in zip(found, wanted, strict=True)
    )
    if not fits:
        raise PackageRefusedError(
            f"it answers {', '.join(f'{dtype}{list(shape)}' for dtype, shape in found)} to {size} "
            f"rows, and the model {', '.join(map(str, job.answers))}. Compile it with the model's "
            "outputs, and state their order."
        )
    return answers


def _fits(shape: Sequence[int], like: Sequence[int], rows: int) -> bool:
    wanted = (rows, *like[1:])
    return len(shape) == len(wanted) and all(
        size in {-1, given} for given, size in zip(shape, wanted, strict=True)
    )


def _example(spec: TensorSpec, job: PackageJob, rows: int) -> "torch.Tensor":
    """Rows of noise, or of zeros and ones that begin with a one: no mask hides all of a row."""
    import torch  # noqa: PLC0415

    best = job.profiles.get(spec.name)
    sizes = [
        best.best[at] if size < 0 and best is not None else max(size, 1)
        for at, size in enumerate(spec.shape)
    ]
    dtype = getattr(torch, spec.dtype)
    shape = [rows, *sizes[1:]]
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    tensor = torch.randint(0, 2, shape)
    if math.prod(shape[1:]) and len(shape) > 1:
        tensor[:, :1] = 1
    return tensor.to(dtype)


def _with_others(tensor: "torch.Tensor", kept: int) -> "torch.Tensor":
    """Its first rows, and below them rows of another mean and spread than theirs."""
    other = tensor.clone()
    other[kept:] = 3 * other[kept:] + 3 if tensor.is_floating_point() else 1
    return other


def share_apart(expected: "torch.Tensor", given: "torch.Tensor") -> float:
    """Largest difference over the largest finite value; NaN and Inf are equal to themselves only.

    A narrow type may overflow on noise, and then the package overflows where eager does.
    """
    differs = (expected != given) & ~(expected.isnan() & given.isnan())
    if not differs.any():
        return 0.0
    apart = (expected - given)[differs].abs().max().item()
    finite = expected[expected.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    return float(apart / max(largest, 1e-30))


def brief(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:600]
