"""Digests and the records they are taken of: same content, same sha256, on every machine."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from enginegate.atomic_io import open_regular, read_file
from enginegate.errors import InputError
from enginegate.messages import explain_validation

_CHUNK_BYTES = 1 << 20


class Record(BaseModel):
    """A frozen value that is written to disk as canonical JSON; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    @property
    def digest(self) -> str:
        """Digest of the canonical JSON of this record."""
        return sha256_bytes(self.canonical_json())

    def canonical_json(self) -> bytes:
        """Sorted keys, no white space, UTF-8; NaN and infinities are refused.

        Fields at their default are left out, so that a field added later changes no digest that
        was taken, and approved, before it was there.
        """
        return canonical_json(self.model_dump(mode="json", exclude_defaults=True))

    def pretty_json(self) -> bytes:
        """The same content, indented for people."""
        text = json.dumps(
            self.model_dump(mode="json"),
            indent=2,
            sort_keys=True,
            allow_nan=False,
            ensure_ascii=False,
        )
        return text.encode() + b"\n"

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a record from a JSON file; a link is not followed.

        Raises:
            InputError: the file is missing, no regular file, not JSON, or does not have this
                record's fields.
        """
        try:
            return cls.model_validate_json(read_file(path))
        except OSError as error:
            raise InputError(f"Cannot read {path}: {error.strerror}.") from error
        except ValidationError as error:
            raise InputError(
                f"{path} is not a valid {cls.__name__} file:\n{explain_validation(error, cls)}\n"
                "It was written by another version, cut short, or edited by hand. Make it again."
            ) from error


def canonical_json(value: Any) -> bytes:
    """The one JSON text of a value: sorted keys, no white space, UTF-8, no NaN."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False
    ).encode()


def sha256_bytes(content: bytes) -> str:
    """Hex digest of bytes."""
    return hashlib.sha256(content).hexdigest()


def sha256_file(path: Path) -> str:
    """Hex digest of a regular file, read in chunks.

    Raises:
        OSError: it is missing, cannot be read, or is a FIFO or the like.
    """
    digest = hashlib.sha256()
    with os.fdopen(open_regular(path, follow_links=True), "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
