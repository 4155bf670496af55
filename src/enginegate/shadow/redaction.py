"""Slices and redacts recorded traffic before anything of it is written.

The user's own functions run here, named in the policy as ``module:callable``. Of an error that they
raise only the class is reported: its message may repeat values that users sent.
"""

import hashlib
import importlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from enginegate.data import Array
from enginegate.errors import DataError, PolicyError
from enginegate.policy.recording import Shadow
from enginegate.shadow.record_batch import RecordBatch, Text

REQUEST_ID = "request_id"
_DIGEST_BYTES = 16
# A slice is a name, not a way for inputs past the redaction.
_LONGEST_SLICE = 100


@dataclass(frozen=True, slots=True)
class Redaction:
    """Values that must not be written down.

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

    def __str__(self) -> str:
        parts = [f"dropped {', '.join(sorted(self.drop))}"] if self.drop else []
        parts += [f"hashed {', '.join(sorted(self.hash))}"] if self.hash else []
        parts += ["outputs only"] if self.outputs_only else []
        parts += [f"rewritten by {self.redactor}"] if self.redactor else []
        return "; ".join(parts) or "nothing"

    def withheld(self, inputs: Sequence[str]) -> tuple[str, ...]:
        """The inputs that are not written."""
        names = set(inputs) if self.outputs_only else (self.drop | self.hash)
        return tuple(name for name in inputs if name in names)

    def apply(self, batch: RecordBatch) -> RecordBatch:
        """The batch without the values that must not be written.

        Raises:
            DataError: an input to redact does not exist (after a typo the real one would be
                written), or the user's code broke or gave rows of another count.
        """
        unknown = (self.drop | self.hash) - set(batch.inputs) - {REQUEST_ID}
        if unknown:
            raise DataError(
                f"Nothing was written: {', '.join(sorted(unknown))} is to be redacted, but the "
                f"requests hold {', '.join(sorted(batch.inputs))}.\nCorrect [shadow] drop and hash."
            )
        batch = self._rewrite(batch)
        columns = {**batch.inputs, REQUEST_ID: batch.request_ids}
        hashes = {name: self._digests(columns[name]) for name in sorted(self.hash & set(columns))}
        withheld = set(self.withheld(tuple(batch.inputs)))
        ids = batch.request_ids
        if REQUEST_ID in self.drop | self.hash:
            ids = np.full(len(batch), "")
        inputs = {name: array for name, array in batch.inputs.items() if name not in withheld}
        return replace(batch, inputs=inputs, request_ids=ids, parameters={}, hashes=hashes)

    def _rewrite(self, batch: RecordBatch) -> RecordBatch:
        if self.redactor is None:
            return batch
        inputs, outputs = call_hook(self.redactor, dict(batch.inputs), dict(batch.outputs))
        if any(len(array) != len(batch) for array in {**inputs, **outputs}.values()):
            raise DataError(f"{self.redactor} gave another count of rows than it was given.")
        return replace(batch, inputs=dict(inputs), outputs=dict(outputs))

    def _digests(self, column: Array) -> Text:
        digests = [
            hashlib.blake2b(
                np.ascontiguousarray(row).tobytes(), key=self._key, digest_size=_DIGEST_BYTES
            ).hexdigest()
            for row in column
        ]
        return np.array(digests, np.str_)


@dataclass(frozen=True, slots=True)
class Preparation:
    """The steps of every row between the recorder and the disk: sliced, then redacted.

    Attributes:
        slice_parameters: request parameters that become slices; a request without one is in slice
            ``""``.
        slicer: ``module:callable``: inputs by name -> text by column, one row a sample.
    """

    redaction: Redaction = field(default_factory=Redaction)
    slice_parameters: tuple[str, ...] = ()
    slicer: str | None = None

    @classmethod
    def of(cls, wanted: Shadow) -> "Preparation":
        """The steps that the policy asks for; the key of its hashes is thrown away afterwards."""
        redaction = Redaction(
            frozenset(wanted.drop), frozenset(wanted.hash), wanted.outputs_only, wanted.redactor
        )
        return cls(redaction, wanted.slice_parameters, wanted.slicer)

    def apply(self, batch: RecordBatch) -> RecordBatch:
        """The batch as it may be written."""
        if self.slice_parameters:
            batch = batch.with_parameters_of_ids()
        nothing = np.full(len(batch), "")
        slices = batch.slices | {
            name: batch.parameters.get(name, nothing) for name in self.slice_parameters
        }
        if self.slicer is not None:
            slices |= self._slices_by_code(self.slicer, batch)
        return self.redaction.apply(replace(batch, slices=slices))

    def _slices_by_code(self, slicer: str, batch: RecordBatch) -> dict[str, Text]:
        named = call_hook(slicer, dict(batch.inputs))
        columns = {name: np.asarray(column).astype(np.str_) for name, column in named.items()}
        for name, column in columns.items():
            if column.shape != (len(batch),):
                raise DataError(
                    f"{slicer} gave slice {name!r} in shape {column.shape} for {len(batch)} "
                    "samples."
                )
        return {name: column.astype(f"<U{_LONGEST_SLICE}") for name, column in columns.items()}


def call_hook(hook: str, *arguments: Any) -> Any:
    """Call the user's ``module:callable``.

    Raises:
        PolicyError: there is no such callable.
        DataError: it raised; only the class of its error is shown, its message may hold user data.
    """
    name, _, attribute = hook.partition(":")
    try:
        function = getattr(importlib.import_module(name), attribute)
    except (ImportError, AttributeError) as error:
        raise PolicyError(
            f"There is no {hook}: {error}.\nIt must be importable from the policy's project or "
            "the folder that enginegate runs in, or be installed."
        ) from error
    try:
        return function(*arguments)
    except Exception as error:  # noqa: BLE001 - the user's code, whatever it raises
        kind = type(error).__name__
    raise DataError(
        f"{hook} raised {kind}; nothing was written. Its message is not shown, as it may repeat "
        "recorded data. Try it on data that is not private."
    )
