"""An AOTInductor package, read without running it: a zip of generated C++ and of what it became.

The generated source states the type of every constant and buffer and which kernels it calls. TF32
is no type there: a multiplication of float32 tensors uses it or not by a switch of the process.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from enginegate.errors import ModelError

_WRAPPER = re.compile(r"\.wrapper\.cpp$")
_METADATA = re.compile(r"wrapper_metadata\.json$")
_CONSTANT = re.compile(r'constants_info_\[(\d+)\]\.(name|original_fqn) = "([^"]*)"')
_CONSTANT_TYPE = re.compile(r"constants_info_\[(\d+)\]\.dtype = cached_torch_dtype_(\w+)")
_CONSTANT_BYTES = re.compile(r"constants_info_\[(\d+)\]\.data_size = (\d+)")
_ALLOCATED = re.compile(r"cached_torch_dtype_(\w+),[^;]*?&(\w+?)_handle\)")
_ALIAS = re.compile(r"\bauto (\w+) = std::move\((\w+)\)|\b(\w+) = std::move\((\w+)\);")
# Kernels of libraries, and Triton's templates of matrix products that autotuning may choose.
_MULTIPLIES = re.compile(
    r"\b(aoti_torch_\w*?(?:mm|convolution|linear|attention|matmul|gru|lstm|rnn|bilinear)\w*"
    r"|\w*triton_tem_fused_\w+|\w*cpp_\w*gemm\w*|\w*grouped_mm\w*)\(([^;]*);"
)
_NAME = re.compile(r"\b(?:_frozen_param\d+|constant_\w+|buf\d+|arg\d+_1|folded_\w+|constant\d+)\b")
_FROZEN = "_frozen_param"
_WORDS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp64": 8}


@dataclass(frozen=True, slots=True)
class PackageEvidence:
    """What the generated source of a package says.

    Attributes:
        frozen: constants that freezing made: folded, or laid out for a kernel.
        original: names of the program's constants that are there as they were.
        multiplications: calls of kernels that multiply, by the type of their weights or inputs.
        weights: numbers stored, by type.
        buffers: tensors between kernels, by type.
        stamp: what was stamped on it, and the machine that compiled it.
    """

    frozen: int
    original: tuple[str, ...]
    multiplications: Mapping[str, int]
    weights: Mapping[str, int]
    buffers: Mapping[str, int]
    stamp: Mapping[str, str]


def read_package(path: Path) -> PackageEvidence:
    """What a package says of itself; nothing of it is run.

    Raises:
        ModelError: it is none.
    """
    try:
        with ZipFile(path) as archive:
            names = archive.namelist()
            sources = [archive.read(name).decode() for name in names if _WRAPPER.search(name)]
            stamps = [json.loads(archive.read(name)) for name in names if _METADATA.search(name)]
    except (BadZipFile, ValueError) as error:
        raise ModelError(f"{path} is no AOTInductor package: {error}. Build it again.") from error
    if not sources or not stamps:
        raise ModelError(
            f"{path} is no AOTInductor package: it holds no generated source. Build it again."
        )
    found = [_read_source(source) for source in sources]
    return PackageEvidence(
        frozen=sum(each.frozen for each in found),
        original=tuple(sorted({name for each in found for name in each.original})),
        multiplications=_sum(each.multiplications for each in found),
        weights=found[0].weights,  # every package of an archive holds all of them
        buffers=_sum(each.buffers for each in found),
        stamp=stamps[0],
    )


def why_not_frozen(
    evidence: PackageEvidence, *, weights: int, statistics: frozenset[str]
) -> str | None:
    """Why a package was not frozen, or None if it was.

    Without freezing AOTInductor keeps every weight as it was exported, and a BatchNorm's division
    by the root of its variance in the kernels; it says nothing about that.

    Args:
        weights: of layers that multiply in the program.
        statistics: names of running means and variances in the program.
    """
    left = sorted(statistics.intersection(evidence.original))
    if left:
        return (
            f"BatchNorm was not folded into its layers: {', '.join(left[:3])} "
            f"{'is' if len(left) == 1 else 'are'} still among the package's constants"
        )
    if weights and not evidence.frozen:
        return (
            f"none of its {len(evidence.original)} constants is frozen, though the program "
            f"multiplies by {weights} weights"
        )
    return None


def _read_source(source: str) -> PackageEvidence:
    names: dict[str, dict[str, str]] = {}
    for index, key, value in _CONSTANT.findall(source):
        names.setdefault(index, {})[key] = value
    types = {index: _WORDS.get(word, word) for index, word in _CONSTANT_TYPE.findall(source)}
    sizes = {index: int(size) for index, size in _CONSTANT_BYTES.findall(source)}
    stored: Counter[str] = Counter()
    for index, word in types.items():
        if word in _BYTES:
            stored[word] += sizes.get(index, 0) // _BYTES[word]
    buffers = {name: _WORDS.get(word, word) for word, name in _ALLOCATED.findall(source)}
    typed = buffers | {names[index]["name"]: word for index, word in types.items()}
    for one, of_one, other, of_other in _ALIAS.findall(source):
        name, of = (one, of_one) if one else (other, of_other)
        if of in typed:
            typed.setdefault(name, typed[of])
    return PackageEvidence(
        frozen=sum(each["name"].startswith(_FROZEN) for each in names.values()),
        original=tuple(
            each["original_fqn"]
            for each in names.values()
            if not each["name"].startswith(_FROZEN) and "original_fqn" in each
        ),
        multiplications=_multiplications(source, typed),
        weights=dict(stored),
        buffers=dict(Counter(buffers.values())),
        stamp={},
    )


def _multiplications(source: str, typed: Mapping[str, str]) -> dict[str, int]:
    """Calls by type; a call that names tensors of two floating types counts as the widest."""
    counts: Counter[str] = Counter()
    start = source.find("::run_impl(")
    for _, arguments in _MULTIPLIES.findall(source[max(start, 0) :]):
        found = {typed[name] for name in _NAME.findall(arguments) if typed.get(name) in _BYTES}
        if found:
            counts[max(found, key=lambda word: (_BYTES[word], word))] += 1
    return dict(counts)


def _sum(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)
