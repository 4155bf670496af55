"""Enginegate: promote the exact engine bytes that passed, and nothing else.

``import enginegate`` is light: what docs/python.md describes is loaded when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginegate.api import (
        ApprovalError,
        EnginegateError,
        InputError,
        PolicyError,
        ReleaseDocument,
        RepositoryError,
        ScorecardDocument,
        ServerError,
        StatusDocument,
        promote,
        qualify,
        rollback,
        status,
    )

__version__ = "0.1.0"
__all__ = [
    "ApprovalError",
    "EnginegateError",
    "InputError",
    "PolicyError",
    "ReleaseDocument",
    "RepositoryError",
    "ScorecardDocument",
    "ServerError",
    "StatusDocument",
    "__version__",
    "promote",
    "qualify",
    "rollback",
    "status",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("enginegate.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
