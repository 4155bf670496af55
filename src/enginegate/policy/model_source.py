"""Where a model comes from: the ``[model]`` table of a policy, and the grammar of its ``uri``."""

import re
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PositiveFloat, PrivateAttr

from enginegate.candidate import BY_ALIAS, BY_VERSION
from enginegate.policy.paths import ROOT
from enginegate.records import Record

_FORMS = {
    "models:/NAME/VERSION": BY_VERSION,
    "models:/NAME@ALIAS": BY_ALIAS,
    "runs:/RUN/PATH": r"runs:/[A-Za-z0-9_-]+/[^/].*",
    "file:PATH.onnx": r"file:.+\.onnx",
    "file:PATH.pt2": r"file:.+\.pt2",
    "hf:FOLDER": r"hf:.+",
    "python:MODULE:CALLABLE": r"python:[A-Za-z_][\w.]*:[A-Za-z_]\w*",
}
FORMS = ", ".join(_FORMS)


def _known_form(uri: str) -> str:
    if not any(re.fullmatch(pattern, uri) for pattern in _FORMS.values()):
        is_file = uri.endswith((".onnx", ".pt2")) and ":" not in uri
        hint = f'; write "file:{uri}"' if is_file else ""
        raise ValueError(f"not one of {FORMS}{hint}")
    if ".." in PurePosixPath(uri.partition(":")[2]).parts:
        raise ValueError("a path in a policy may not contain '..'; use an absolute path")
    return uri


class ModelSource(Record):
    """Where the model comes from (docs/sources.md)."""

    uri: Annotated[str, AfterValidator(_known_form)] = Field(description=f"one of {FORMS}")
    allow_pickle: bool = Field(
        default=False,
        description="load formats that can run code when opened (pickle): only if you trust it",
    )
    allow_code: bool = Field(
        default=False,
        description="import and run Python for `python:` sources, and code in `hf:` folders",
    )
    parity_max_abs_error: PositiveFloat = Field(
        default=1e-3, description="largest difference allowed between framework and ONNX outputs"
    )

    _root: Path | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any, /) -> None:
        """Remember the folder that relative paths start from; no part of the record."""
        self._root = (context or {}).get(ROOT)

    @property
    def scheme(self) -> str:
        """The part before the colon: models, runs, file, hf or python."""
        return self.uri.partition(":")[0]

    @property
    def location(self) -> str:
        """The part after the scheme."""
        return self.uri.partition(":")[2]

    @property
    def path(self) -> Path:
        """The file or folder of a `file:` or `hf:` address."""
        return (self._root or Path()) / self.location

    @property
    def registered(self) -> bool:
        """Whether it is a version in MLflow's registry, so that an alias can stand for it."""
        return self.scheme == "models"
