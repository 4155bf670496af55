"""The one door to Hugging Face ``datasets``: a folder of ``save_to_disk``, or Arrow files.

Nothing is fetched and no code of a data set is run; its files must be in its own folder.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from enginegate.candidate import Sha256
from enginegate.data_sources.parquet import rows_to_see, table_blocks, table_columns
from enginegate.data_sources.reader import BLOCK_BYTES, BLOCK_ROWS, Block, Column, files_digest
from enginegate.errors import DataError
from enginegate.messages import first_line
from enginegate.policy.data import Padding

STATE, SPLITS = "state.json", "dataset_dict.json"
_MOST_BYTES = 1 << 24  # of a description: one in a thousand files has a hundredth of it


class HfDatasetReader:
    """A data set of Hugging Face ``datasets`` on disk, memory-mapped."""

    form = "Hugging Face dataset"

    def __init__(self, path: Path, padded: Mapping[str, Padding] | None = None) -> None:
        """Open the files and read the first rows.

        Args:
            path: a folder of ``Dataset.save_to_disk``, a folder of Arrow files, or one of them.
            padded: how columns of lists of several lengths are filled up.

        Raises:
            DataError: it holds several splits, names files elsewhere, or is damaged.
        """
        self.origin, self._path, self._padded = str(path), path, padded or {}
        self._files = _files(path)
        self._dataset = _opened(path, self._files)
        self.samples: int | None = len(self._dataset)
        if not self.samples:
            raise DataError(f"{path} holds no rows.")
        features = self._dataset.features
        first = self._dataset.with_format("arrow")[: rows_to_see(self._padded)]
        self.columns: Mapping[str, Column] = {
            name: replace(column, classes=tuple(getattr(features[name], "names", None) or ()))
            for name, column in table_columns(path, first, self._padded).items()
        }

    def blocks(self, names: Sequence[str]) -> Iterator[Block]:
        """See `DataReader.blocks`."""
        row_bytes = max(1.0, self._dataset.data.nbytes / max(1, len(self._dataset)))
        step = max(1, min(BLOCK_ROWS, int(BLOCK_BYTES / row_bytes)))
        chosen = self._dataset.select_columns(list(names)).with_format("arrow")
        for table in chosen.iter(batch_size=step):
            yield from table_blocks(self._path, table, names, self._padded)

    def content_digest(self) -> Sha256:
        """Of the files."""
        return files_digest(self._files)


def is_hf_dataset(path: Path) -> bool:
    """Whether a path is of a form that this module reads."""
    if path.is_dir():
        return any((path / name).is_file() for name in (STATE, SPLITS)) or any(path.glob("*.arrow"))
    return path.suffix == ".arrow"


def _files(path: Path) -> list[Path]:
    """The files of a data set, its own description first; all inside its folder."""
    if not path.is_dir():
        return [path]
    if (path / SPLITS).is_file():
        splits = sorted(inner.parent.name for inner in path.glob(f"*/{STATE}"))
        raise DataError(
            f"{path} holds several splits: {', '.join(splits)}. Name the folder of one, e.g. "
            f"{path / (splits or ['test'])[0]}."
        )
    if not (path / STATE).is_file():
        return sorted(each for each in path.glob("*.arrow") if each.is_file())
    state = path / STATE
    try:
        if state.stat().st_size > _MOST_BYTES:
            raise DataError(f"{state} is larger than any description of a data set.")
        listed = [str(each["filename"]) for each in json.loads(state.read_text())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{state} is damaged: {first_line(error)}. Write it again with save_to_disk."
        ) from error
    root = path.resolve()
    for name in listed:
        if Path(name).name != name or not (root / name).resolve().is_relative_to(root):
            raise DataError(
                f"{path} was not opened: its {STATE} names the file {name!r:.200}, which is not in "
                "the folder. Write it again with save_to_disk."
            )
    return [state, path / "dataset_info.json", *(path / name for name in listed)]


def _opened(path: Path, files: Sequence[Path]) -> Any:
    vendor = _vendor()
    try:
        if (path / STATE).is_file():
            return vendor.Dataset.load_from_disk(str(path), keep_in_memory=False)
        parts = [vendor.Dataset.from_file(str(file)) for file in files]
        return vendor.concatenate_datasets(parts) if len(parts) > 1 else parts[0]
    except FileNotFoundError as error:
        raise DataError(f"{path} is not whole: {first_line(error)}") from error
    except Exception as error:  # a damaged file makes the library raise whatever it meets
        raise DataError(
            f"{path} cannot be read as a Hugging Face dataset: {first_line(error)}. Write it again "
            "with save_to_disk."
        ) from error


def _vendor() -> Any:
    try:
        import datasets  # type: ignore[import-untyped]  # noqa: PLC0415
    except ImportError as error:
        raise DataError(
            "This is a Hugging Face dataset, and the package datasets is not installed. Run: pip "
            "install 'enginegate[datasets]'"
        ) from error
    datasets.disable_progress_bars()
    logging.getLogger("datasets").setLevel(logging.ERROR)
    return datasets
