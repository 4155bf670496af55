"""The ``[data]`` table: where each set of data is, and how its columns become a model's inputs.

A set is a file or a folder of any form of docs/data.md, ``mlflow:RUN/NAME`` (a dataset that a run
logged), or ``python:MODULE:CALLABLE``. A record holds it as it was written.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from enginegate.policy.paths import ROOT
from enginegate.records import Record

_ADDRESSES = {
    "mlflow": r"mlflow:[A-Za-z0-9_-]+/.+",
    "python": r"python:[A-Za-z_][\w.]*:[A-Za-z_]\w*",
}
Number: TypeAlias = Literal[
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64",
]  # fmt: skip


class InputColumns(Record):
    """The columns that one input of the model is made of.

    Attributes:
        columns: one, or several columns of numbers that are put side by side, shape ``(N, C)``.
        dtype: what their values are converted to; None keeps the type that they have.
    """

    columns: tuple[str, ...] = Field(min_length=1, description="one column, or several of numbers")
    dtype: Number | None = Field(default=None, description="what their values are converted to")

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, raw: Any) -> Any:
        """``"pixels"`` and ``["age", "bmi"]`` are short for tables."""
        if isinstance(raw, str):
            return {"columns": (raw,)}
        if isinstance(raw, list | tuple):
            return {"columns": tuple(raw)}
        if isinstance(raw, dict) and isinstance(raw.get("columns"), str):
            return {**raw, "columns": (raw["columns"],)}
        return raw


class Padding(Record):
    """How lists of several lengths become rows of one length."""

    length: PositiveInt = Field(description="values of each row; a longer list is refused")
    fill: float = Field(default=0.0, description="what follows a list's own values")


class DataColumns(Record):
    """Which columns are inputs, labels and slices, where they are not named as arrays are.

    A column called `input.NAME`, `label`, `label.OUTPUT`, `slice.COLUMN` or `id` needs no word.
    """

    inputs: dict[str, InputColumns] = Field(
        default_factory=dict,
        description="by the model's input: a column, a list of columns of numbers that are put "
        'side by side, or `{ columns = [...], dtype = "float32" }`',
    )
    label: str | None = Field(default=None, description="column of the class of each sample")
    labels: dict[str, str] = Field(
        default_factory=dict, description="by output: column of what it should be"
    )
    classes: tuple[str, ...] = Field(
        default=(),
        description="texts of the label in the order of the model's classes; an image folder's "
        "are otherwise its folders in alphabetical order",
    )
    slices: tuple[str, ...] = Field(
        default=(), description="columns of text or whole numbers; each of their values is a slice"
    )
    id: str | None = Field(default=None, description="column that names each sample")
    padded: dict[str, Padding] = Field(
        default_factory=dict,
        description="by column of lists: the length that shorter lists are filled up to, such as "
        "tokens (`fill = 0`) or boxes (`fill = -1`)",
    )


class ImageRules(Record):
    """How an encoded image becomes an input, in this order; as the model was trained.

    Decoded by Pillow, turned as its EXIF data says, and converted to RGB or grey; resized; cropped
    in the middle; divided; normalised.
    """

    channels: Literal[1, 3] = Field(default=3, description="3: RGB, 1: grey")
    exif: bool = Field(default=True, description="turn photographs as their EXIF data says")
    size: tuple[PositiveInt, PositiveInt] | None = Field(
        default=None, description="height and width that images are resized to"
    )
    shorter_side: PositiveInt | None = Field(
        default=None, description="resized until the shorter side has this many pixels"
    )
    crop: tuple[PositiveInt, PositiveInt] | None = Field(
        default=None, description="height and width that are cut out of the middle"
    )
    resample: Literal["nearest", "bilinear", "bicubic", "lanczos"] = Field(
        default="bilinear", description="how images are resized"
    )
    dtype: Literal["float32", "uint8"] = Field(
        default="float32", description="uint8 keeps values from 0 to 255 as they are"
    )
    divide_by: PositiveFloat = Field(
        default=255.0, description="float32: each value is divided by this"
    )
    mean: tuple[float, ...] = Field(
        default=(), description="float32: subtracted then, one for each channel"
    )
    std: tuple[PositiveFloat, ...] = Field(
        default=(), description="float32: divided by at last, one for each channel"
    )
    layout: Literal["nchw", "nhwc"] = Field(
        default="nchw", description="where the axis of the channels is"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.size and self.shorter_side:
            raise ValueError("size and shorter_side both resize: state one of them")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values and len(values) != self.channels:
                raise ValueError(f"{name} needs {self.channels} numbers, one for each channel")
            if values and self.dtype == "uint8":
                raise ValueError(f'{name} is for dtype = "float32"')
        return self


@dataclass(frozen=True, slots=True)
class DataSource:
    """One set of data: where it is, and how it is read.

    Attributes:
        written: as the policy says it: a path, ``mlflow:RUN/NAME`` or ``python:MODULE:CALLABLE``.
        path: the file or folder, absolute if its project is known; None where it is neither.
        root: the policy's project; None if the policy was not read from a file.
        columns: what its columns are.
        images: how its images are decoded.
        allow_code: whether a Python function of yours may be imported and called.
        labelled: whether it needs the label, slice and id columns that the policy names; evaluation
            data does.
    """

    written: str
    path: Path | None
    root: Path | None = None
    columns: DataColumns = field(default_factory=DataColumns)
    images: ImageRules = field(default_factory=ImageRules)
    allow_code: bool = False
    labelled: bool = True

    def __str__(self) -> str:
        return self.written

    @property
    def scheme(self) -> str:
        """``mlflow``, ``python``, or ``file`` for everything that has a path."""
        return "file" if self.path is not None else self.written.partition(":")[0]

    @property
    def location(self) -> str:
        """The part after ``mlflow:`` or ``python:``; a path as it is."""
        return self.written if self.path is not None else self.written.partition(":")[2]

    @property
    def mapped(self) -> bool:
        """Whether the policy says of any column what it is."""
        return self.columns != DataColumns()


def data_source(written: str | Path, root: Path | None = None) -> DataSource:
    """The set that a text of a policy, or a path, stands for.

    Raises:
        ValueError: the path contains ``..``, or the address is none.
    """
    text = str(getattr(written, "written", "") or written)
    scheme = text.partition(":")[0]
    if scheme in _ADDRESSES and not isinstance(written, Path):
        if not re.fullmatch(_ADDRESSES[scheme], text):
            raise ValueError(f"must be {_WORDS[scheme]}")
        return DataSource(text, None, root)
    if not text:
        raise ValueError("must name a file or a folder")
    if ".." in PurePath(text).parts:
        raise ValueError(
            "a path in a policy may not contain '..'; use an absolute path, or move the file"
        )
    path = Path(written) if isinstance(written, Path) else Path(text)
    # ``./data.npz`` is ``data.npz``: a policy's digest holds the plain form, as of all its paths.
    return DataSource(str(PurePath(text)), path if root is None else root / path, root)


_WORDS = {"mlflow": "mlflow:RUN/NAME", "python": "python:MODULE:CALLABLE"}


def _validated(raw: Any, info: ValidationInfo) -> Any:
    if isinstance(raw, DataSource):
        return raw
    if not isinstance(raw, str | Path):
        raise ValueError("must be a path, or an address of data, in quotes")  # noqa: TRY004 - pydantic
    return data_source(raw, (info.context or {}).get(ROOT))


SourceOfData = Annotated[
    DataSource,
    BeforeValidator(_validated),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "format": "path"}),
]


class Data(Record):
    """What candidates are judged on: data of any form of docs/data.md.

    A set is a path, `mlflow:RUN/NAME` or `python:MODULE:CALLABLE`.
    """

    evaluation: SourceOfData = Field(description="labelled inputs, with slice columns")
    calibration: SourceOfData | None = Field(
        default=None,
        description="representative inputs; without it int8 and fp8 are not built, and are "
        "inconclusive",
    )
    shadow: SourceOfData | None = Field(
        default=None,
        description="recorded live requests: arrays, or a folder of `enginegate shadow` (see "
        "docs/shadow.md); without it [shadow] says where to get them",
    )
    columns: DataColumns = Field(
        default=DataColumns(), description="what the columns of every set are"
    )
    images: ImageRules = Field(
        default=ImageRules(), description="how the images of every set are decoded"
    )
    allow_code: bool = Field(
        default=False,
        description="import and call the functions that `python:` sets name: only if you trust "
        "that code",
    )

    def model_post_init(self, context: Any, /) -> None:  # noqa: ARG002 - pydantic calls it
        """Give every set the table's rules, so that a set alone says how it is read."""
        for name in ("evaluation", "calibration", "shadow"):
            source = getattr(self, name)
            if source is not None:
                alike = self.read_alike(source)
                self.__dict__[name] = replace(alike, labelled=name == "evaluation")

    def read_alike(self, source: DataSource) -> DataSource:
        """Another set, read by the rules of this table; it needs no labels."""
        return replace(
            source,
            columns=self.columns,
            images=self.images,
            allow_code=self.allow_code,
            labelled=False,
        )

    @property
    def sources(self) -> Mapping[str, DataSource]:
        """The sets that are named, by key."""
        found = {name: getattr(self, name) for name in ("evaluation", "calibration", "shadow")}
        return {name: source for name, source in found.items() if source is not None}
