"""Data of other forms is turned once into arrays in the workspace, and memory-mapped from there.

A converted set is kept by the digest of everything that decides its values: its files' contents,
what the policy says of its columns and images, and what decodes images. A function's is kept by
the digest of its samples, and the function is called once in a process.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import Field, ValidationError

from enginegate.atomic_io import sync_tree, write_file
from enginegate.content_store import make_once
from enginegate.data import Array, DataSet, data_set
from enginegate.data_sources.array_files import ArrayFiles, map_arrays
from enginegate.data_sources.columns import ArrayRule, array_rules, make_array
from enginegate.data_sources.images import decode_images, decoder_version
from enginegate.data_sources.reader import Block, DataReader
from enginegate.errors import DataError, InputError
from enginegate.policy.data import DataSource
from enginegate.records import Record, canonical_json, sha256_bytes

_log = logging.getLogger("enginegate.data")
# Of the files and their rules; a change makes every set be converted again.
_LAYOUT = 1
_MANIFEST = "manifest.json"
_WAIT_S = 6 * 3600.0  # a set of terabytes is copied at the speed of its disk


class ConvertedData(Record):
    """What a folder of converted data holds.

    Attributes:
        samples: rows of every array.
        names: of the arrays, by file.
        sizes: of the files, bytes.
    """

    form: str
    samples: int
    names: dict[str, str]
    sizes: dict[str, int] = Field(default_factory=dict)


def converted_data(reader: DataReader, source: DataSource, store: Path) -> DataSet:
    """The samples of a reader by the rules of a source, memory-mapped; converted unless they are.

    Args:
        store: folder of converted data.

    Raises:
        DataError: a column is missing, or a value cannot be read.
        EnginegateError: the store cannot be written.
    """
    rules = _rules(reader, source)
    content = reader.content_digest()
    if content is None:
        return data_set(_of_unknown_content(reader, rules, source, store), reader.origin)
    key = {
        "layout": _LAYOUT,
        "form": reader.form,
        "content": content,
        "columns": source.columns.digest,
        "arrays": [rule.name for rule in rules],
        "images": _image_key(reader, rules, source),
    }
    made = make_once(
        store / sha256_bytes(canonical_json(key)),
        read=_read_manifest,
        make=lambda folder: _convert(reader, rules, source, folder),
        wait_s=_WAIT_S,
    )
    if made.note:
        _log.warning("%s", made.note)
    return data_set(_mapped(made.folder, made.value), reader.origin)


def first_rows(reader: DataReader, source: DataSource) -> DataSet:
    """The first rows of a reader, as they will be in the data set.

    Raises:
        DataError: as `converted_data`, of these rows.
    """
    rules = _rules(reader, source)
    block = next(iter(reader.blocks(_columns_of(rules))), None)
    if block is None:
        raise DataError(f"{reader.origin} holds no samples.")

    return data_set(_arrays(rules, block, source, reader.origin), reader.origin)


def _arrays(
    rules: tuple[ArrayRule, ...], block: Block, source: DataSource, origin: str, first: int = 0
) -> dict[str, Array]:
    """A block's arrays; ``first`` is the number of its first sample, for messages."""
    names = [str(each) for each in block.get("id", ())]

    def decode(encoded: list[bytes]) -> Array:
        return decode_images(encoded, source.images, origin, first=first, names=names)

    return {rule.name: make_array(rule, block, decode, origin) for rule in rules}


def _rules(reader: DataReader, source: DataSource) -> tuple[ArrayRule, ...]:
    return array_rules(reader.columns, source.columns, reader.origin, labelled=source.labelled)


def _columns_of(rules: tuple[ArrayRule, ...]) -> list[str]:
    return sorted({column for rule in rules for column in rule.columns})


def _of_unknown_content(
    reader: DataReader, rules: tuple[ArrayRule, ...], source: DataSource, store: Path
) -> Mapping[str, Array]:
    """Convert first, then keep by the digest of what came out."""
    store.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=store, prefix=".function.", suffix=".tmp"))
    try:
        manifest = _convert(reader, rules, source, staging)
        digest = data_set(_mapped(staging, manifest), reader.origin).sha256
        folder = store / digest
        sync_tree(staging)
        with suppress(OSError):  # another process, or an earlier one, has the same samples
            staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return _mapped(folder, _read_manifest(folder))


def _convert(
    reader: DataReader, rules: tuple[ArrayRule, ...], source: DataSource, folder: Path
) -> ConvertedData:
    origin = reader.origin
    wanted = _columns_of(rules)
    _log.info("%s: converting %s to arrays", origin, reader.form)

    with ArrayFiles(folder, origin) as files:
        for block in reader.blocks(wanted):
            files.append(_arrays(rules, block, source, origin, files.samples))
        if not files.samples:
            raise DataError(f"{origin} holds no samples.")
        names, samples = files.finish(), files.samples
    sizes = {name: (folder / name).stat().st_size for name in names}
    made = ConvertedData(form=reader.form, samples=samples, names=names, sizes=sizes)
    write_file(folder / _MANIFEST, made.pretty_json(), mode=0o600)
    _log.info("%s: %d samples, %.1f MiB", origin, samples, sum(sizes.values()) / (1 << 20))
    return made


def _image_key(reader: DataReader, rules: tuple[ArrayRule, ...], source: DataSource) -> str | None:
    if all(reader.columns[name].kind != "image" for name in _columns_of(rules)):
        return None
    return f"{source.images.digest} {decoder_version()}"


def _read_manifest(folder: Path) -> ConvertedData:
    try:
        manifest = ConvertedData.read(folder / _MANIFEST)
        wrong = [
            name
            for name, size in manifest.sizes.items()
            if Path(name).name != name or os.stat(folder / name).st_size != size  # noqa: PTH116
        ]
    except (OSError, ValidationError) as error:
        raise InputError(f"{folder}: {error}.") from error
    if wrong:
        raise InputError(f"{folder}: {wrong[0]} has another size than when it was written.")
    return manifest


def _mapped(folder: Path, manifest: ConvertedData) -> dict[str, Array]:
    try:
        return map_arrays(folder, manifest.names)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} is damaged: {error}. Delete it, and run again.") from error
