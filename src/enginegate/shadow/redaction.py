"""What is taken out of recorded traffic before anything is written, and what is read from it first.

Code of the user's runs here, named in the policy as ``module:callable``. What it raises is reported
by kind only: its message may repeat what users sent.
"""

import hashlib
import importlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from enginegate.data import Array
from enginegate.errors import DataError, PolicyError
from enginegate.policy.recording import Shadow
from enginegate.shadow.record_batch import RecordBatch, Text

Slicer: TypeAlias = Callable[[RecordBatch], Mapping[str, Text]]

REQUEST_ID = "request_id"
_DIGEST_BYTES = 16
_LONGEST_SLICE = 100


@dataclass(frozen=True, slots=True)
class Redaction:
    """What must not be written down.

    Attributes:
        drop: inputs, or ``request_id``, that leave no trace.
        hash: those of which a keyed digest stays, so that repeats can be counted.
        outputs_only: no input is written.
        redactor: ``(inputs, outputs) -> (inputs, outputs)`` on arrays of shape ``(N, ...)``.
    """

    drop: frozenset[str] = frozenset()
    hash: frozenset[str] = frozenset()
    outputs_only: bool = False
    redactor: str | None = None
    # Without the key a digest of a short input could be found by trying them all.
    _key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    @classmethod
    def of(cls, wanted: Shadow) -> "Redaction":
        """What the policy asks for, with a key of its own that is thrown away."""
        return cls(
            frozenset(wanted.drop), frozenset(wanted.hash), wanted.outputs_only, wanted.redactor
        )

    def __str__(self) -> str:
        parts = [f"dropped {', '.join(sorted(self.drop))}"] if self.drop else []
        parts += [f"hashed {', '.join(sorted(self.hash))}"] if self.hash else []
        parts += ["outputs only"] if self.outputs_only else []
        parts += [f"rewritten by {self.redactor}"] if self.redactor else []
        return "; ".join(parts) or "nothing"

    def withheld(self, inputs: Sequence[str]) -> tuple[str, ...]:
        """The inputs that are not written."""
        gone = set(inputs) if self.outputs_only else (self.drop | self.hash)
        return tuple(name for name in inputs if name in gone)

    def apply(self, block: RecordBatch) -> RecordBatch:
        """The block without what must not be written.

        Raises:
            DataError: it names an input that there is not (a typo would write what it should not),
                or the user's code broke or gave rows of another count.
        """
        unknown = (self.drop | self.hash) - set(block.inputs) - {REQUEST_ID}
        if unknown:
            raise DataError(
                f"Nothing was written: {', '.join(sorted(unknown))} is to be redacted, but the "
                f"requests hold {', '.join(sorted(block.inputs))}.\nCorrect [shadow] drop and hash."
            )
        block = self._rewritten(block)
        columns = {**block.inputs, REQUEST_ID: block.request_ids}
        hashes = {name: self._digests(columns[name]) for name in sorted(self.hash & set(columns))}
        gone = set(self.withheld(tuple(block.inputs)))
        ids = block.request_ids
        if REQUEST_ID in self.drop | self.hash:
            ids = np.full(len(block), "")
        kept = {name: array for name, array in block.inputs.items() if name not in gone}
        return replace(block, inputs=kept, request_ids=ids, parameters={}, hashes=hashes)

    def _rewritten(self, block: RecordBatch) -> RecordBatch:
        if self.redactor is None:
            return block
        inputs, outputs = called(self.redactor, dict(block.inputs), dict(block.outputs))
        tensors = {**inputs, **outputs}
        if any(len(array) != len(block) for array in tensors.values()):
            raise DataError(f"{self.redactor} gave another count of rows than it was given.")
        return replace(block, inputs=dict(inputs), outputs=dict(outputs))

    def _digests(self, column: Array) -> Text:
        digests = [
            hashlib.blake2b(
                np.ascontiguousarray(row).tobytes(), key=self._key, digest_size=_DIGEST_BYTES
            ).hexdigest()
            for row in column
        ]
        return np.array(digests, np.str_)


def slices_by_parameter(names: Sequence[str]) -> Slicer:
    """Slices from request parameters of these names; a request without one is in slice ``""``."""

    def find(block: RecordBatch) -> Mapping[str, Text]:
        nothing = np.full(len(block), "")
        return {name: block.parameters.get(name, nothing) for name in names}

    return find


def slices_by_code(hook: str) -> Slicer:
    """Slices from ``module:callable``: inputs by name -> text by column, one row a sample."""

    def find(block: RecordBatch) -> Mapping[str, Text]:
        found = called(hook, dict(block.inputs))
        columns = {name: np.asarray(column).astype(np.str_) for name, column in found.items()}
        for name, column in columns.items():
            if column.shape != (len(block),):
                raise DataError(
                    f"{hook} gave slice {name!r} in shape {column.shape} for {len(block)} samples."
                )
        # A slice is a name, not a way for inputs past the redaction.
        return {name: column.astype(f"<U{_LONGEST_SLICE}") for name, column in columns.items()}

    return find


def slicers_of(wanted: Shadow) -> tuple[Slicer, ...]:
    """The slices that the policy asks for."""
    found: list[Slicer] = []
    if wanted.slice_parameters:
        found.append(slices_by_parameter(wanted.slice_parameters))
    if wanted.slicer is not None:
        found.append(slices_by_code(wanted.slicer))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Preparation:
    """What happens to every row between the recorder and the disk: sliced, then redacted."""

    slicers: tuple[Slicer, ...] = ()
    redaction: Redaction = field(default_factory=Redaction)
    parameters_in_ids: bool = False

    @classmethod
    def of(cls, wanted: Shadow, *more: Slicer) -> "Preparation":
        """What the policy asks for, and further slices."""
        return cls(
            (*slicers_of(wanted), *more), Redaction.of(wanted), bool(wanted.slice_parameters)
        )

    def apply(self, block: RecordBatch) -> RecordBatch:
        """The block as it may be written."""
        whole = block.with_parameters_of_ids() if self.parameters_in_ids else block
        slices = dict(whole.slices)
        for slicer in self.slicers:
            slices |= slicer(whole)
        return self.redaction.apply(replace(whole, slices=slices))


def called(hook: str, *arguments: Any) -> Any:
    """What the user's ``module:callable`` answers.

    Raises:
        PolicyError: there is no such callable.
        DataError: it raised; only the kind of error is shown, its message may hold user data.
    """
    name, _, attribute = hook.partition(":")
    try:
        call = getattr(importlib.import_module(name), attribute)
    except (ImportError, AttributeError) as error:
        raise PolicyError(
            f"There is no {hook}: {error}.\nIt must be importable from the policy's project or "
            "the folder that enginegate runs in, or be installed."
        ) from error
    try:
        return call(*arguments)
    except Exception as error:  # noqa: BLE001 - the user's code, whatever it raises
        kind = type(error).__name__
    raise DataError(
        f"{hook} raised {kind}; nothing was written. Its message is not shown, as it may repeat "
        "recorded data. Try it on data that is not private."
    )
