"""Candidates that something else made: a policy's `[candidates] made`, read and checked.

ONNX files (quantised with pairs by quantisation-aware training, for one), AOTInductor packages, and
AITune's ``.ait`` archives, of which only the engine inside is read: the pickle beside it is never
opened. ONNX is data. A package is native code, and is loaded only where the policy allows it.
"""

import os
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath
from zipfile import BadZipFile, ZipFile

import onnx

from enginegate.atomic_io import write_file
from enginegate.candidate import FileDigest, OnnxModel, Provenance, TensorSpec
from enginegate.data import archive_objections
from enginegate.errors import BuildError, InputError
from enginegate.policy.building import MadeElsewhere
from enginegate.policy.paths import as_written
from enginegate.precision import Conversion
from enginegate.records import sha256_bytes
from enginegate.sources.onnx_form import (
    MOST_NODES,
    ONE_FILE_BYTES,
    graphs,
    input_specs,
    other_files,
    output_specs,
    parse_onnx,
)

# Ends a sentence that begins with the file.
CODE_REFUSED = (
    "is native code, which runs with all rights of this process and of Triton, and allow_code is "
    "false. If you trust who made it, set allow_code = true beside it under [candidates] made, and "
    "its sha256."
)
_ARCHIVE = ".ait"


@dataclass(frozen=True, slots=True)
class MadeFile:
    """A file that holds a candidate, with its digest.

    Attributes:
        table: what the policy says of it.
        digest: of the file as it is now.
    """

    table: MadeElsewhere
    digest: FileDigest

    @classmethod
    def open(cls, table: MadeElsewhere) -> "MadeFile":
        """Read the digest.

        Raises:
            BuildError: the file is missing, cannot be read, or is not the one that the policy
                names by its digest; or it is native code, which the policy does not allow.
        """
        path = table.file
        try:
            digest = FileDigest.of(path)
        except OSError as error:
            raise BuildError(
                f"{path} cannot be read: {error.strerror}. Correct the path."
            ) from error
        if table.sha256 is not None and table.sha256 != digest.sha256:
            raise BuildError(
                f"{path} is not the file that the policy names: its sha256 is {digest.sha256}, and "
                f"made says {table.sha256}. Put that file back, or qualify this one on purpose."
            )
        if table.is_code and not table.allow_code:
            raise BuildError(f"{as_written(path)} {CODE_REFUSED}")
        return cls(table, digest)

    @property
    def provenance(self) -> Provenance:
        """What is recorded of it with the engine."""
        return Provenance(
            file=str(as_written(self.table.file)),
            sha256=self.digest.sha256,
            size_bytes=self.digest.size_bytes,
            made_by=self.table.made_by,
        )

    def conversion(self, model: OnnxModel) -> Conversion:
        """The ONNX model, whole, which takes and answers what the FP32 model does.

        Raises:
            BuildError: it is no ONNX, is another file by now, keeps weights in other files, is too
                large for one, or its inputs or outputs are not the model's.
        """
        origin = str(as_written(self.table.file))
        try:
            content = self._engine_bytes()
            if len(content) > ONE_FILE_BYTES:
                raise BuildError(f"{origin} is larger than one ONNX file may be, 2 GiB.")
            found = parse_onnx(content, origin=origin)
        except InputError as error:
            raise BuildError(str(error)) from error
        if others := other_files(found):
            raise BuildError(
                f"{origin} keeps weights in {', '.join(map(repr, others[:8]))}, and its sha256 "
                "says nothing of these. Save it as one file, in Python: "
                "onnx.save(onnx.load(FILE), NEW_FILE, save_as_external_data=False)."
            )
        nodes = sum(len(graph.node) for graph in graphs(found.graph))
        if nodes > MOST_NODES:
            raise BuildError(f"{origin} has {nodes:,} nodes, and {MOST_NODES:,} is the most.")
        _check_specs("takes", input_specs(found), model.inputs, origin)
        _check_specs("answers", output_specs(found), model.outputs, origin)
        try:
            onnx.checker.check_model(found)
        except (onnx.checker.ValidationError, ValueError) as error:
            raise BuildError(f"{origin} is not valid ONNX: {str(error).strip()}") from error
        return Conversion(content, self.description)

    @property
    def description(self) -> str:
        """Where it comes from, in words."""
        return str(self.provenance)

    def copy_package(self, target: Path) -> None:
        """Put the AOTInductor package at ``target``, byte for byte.

        Raises:
            BuildError: it cannot be read, or is another file by now.
        """
        write_file(target, self._engine_bytes())

    def _engine_bytes(self) -> bytes:
        """The engine's own bytes, out of those that have the digest."""
        path = self.table.file
        try:
            content = path.read_bytes()
        except OSError as error:
            raise BuildError(f"{path} cannot be read: {error.strerror}.") from error
        # Whoever can write the file may do so after its digest was compared with the policy's.
        found = sha256_bytes(content)
        if found != self.digest.sha256:
            raise BuildError(
                f"{path} was replaced meanwhile: its sha256 was {self.digest.sha256}, and is "
                f"{found}. Qualify again when nobody writes it."
            )
        return _engine_in(self.table, content) if path.suffix == _ARCHIVE else content


def _engine_in(table: MadeElsewhere, content: bytes) -> bytes:
    """The archive's one file of the kind; nothing else of it is read.

    Raises:
        BuildError: it is no archive, or holds none or several.
    """
    path, suffix = table.file, table.engine_suffix
    try:
        with ZipFile(BytesIO(content)) as archive:
            for why in archive_objections(path, archive):
                raise BuildError(f"{as_written(path)}: {why}")
            held = [name for name in archive.namelist() if not name.endswith("/")]
            engines = [name for name in held if PurePosixPath(name).suffix == suffix]
            if len(engines) == 1:
                return archive.read(engines[0])
    except (BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise BuildError(f"{path} is no AITune archive: {error}. Save it again.") from error
    except InputError as error:
        raise BuildError(str(error)) from error
    listed = ", ".join(os.path.basename(name) for name in held[:8]) or "nothing"  # noqa: PTH119
    raise BuildError(
        f"{as_written(path)} holds {len(engines)} engines that end in {suffix}, and one is needed: "
        f"it holds {listed}. Tune the whole model as one module, or take the engine out yourself."
    )


def _check_specs(
    verb: str, found: tuple[TensorSpec, ...], wanted: tuple[TensorSpec, ...], origin: str
) -> None:
    """Refuse other tensors than the FP32 model's; a size may be fixed where the model's is.

    Raises:
        BuildError: which tensor differs, and how.
    """
    given = {spec.name: spec for spec in found}
    for spec in wanted:
        other = given.pop(spec.name, None)
        if other is None:
            names = ", ".join(each.name for each in found)
            raise BuildError(
                f"{origin} {verb} {names}, and the FP32 model {spec}. Name its tensors alike."
            )
        same_sizes = len(other.shape) == len(spec.shape) and all(
            theirs in {-1, ours} for ours, theirs in zip(spec.shape, other.shape, strict=True)
        )
        if other.dtype != spec.dtype or not same_sizes:
            raise BuildError(
                f"{origin} {verb} {other}, and the FP32 model {spec}. Export it with the types and "
                "the dynamic axes of the FP32 model: only what is between may differ."
            )
    if given:
        raise BuildError(
            f"{origin} {verb} {', '.join(map(str, given.values()))} besides, which the FP32 model "
            "does not have. Remove it."
        )
