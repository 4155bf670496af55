"""Functions of the user's that a policy names as ``module:callable``: whether they are there.

Nothing is imported to find out, because that would run their code.
"""

import ast
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
)
from pathlib import Path
from types import ModuleType

# Enginegate's own packages wherever a flow runs: docs/adr/0014-installed-flows.md.
TAKEN_NAMES = ("flows", "tasks", "validation")
_LOADERS = ((ExtensionFileLoader, EXTENSION_SUFFIXES), (SourceFileLoader, SOURCE_SUFFIXES))
# A module that defines names in these ways may define any.
_DYNAMIC = frozenset({"globals", "exec", "setattr", "vars", "__import__"})


def why_missing(hook: str, folder: Path) -> str:
    """Why there is no such function, or an empty text.

    Args:
        hook: ``module:callable``.
        folder: where modules are looked for besides the current folder and Python's own path.
    """
    module, _, attribute = hook.partition(":")
    if (package := module.partition(".")[0]) in TAKEN_NAMES:
        return f"{package} is a package of Enginegate's own wherever a flow runs; rename yours"
    if module in sys.modules:
        there = hasattr(sys.modules[module], attribute)
        return "" if there else f"module {module} defines no {attribute}"
    try:
        spec = _find(module, [str(folder), str(Path.cwd()), *sys.path])
    except (ImportError, ValueError, OSError) as error:
        return f"module {module} cannot be looked for: {error}"
    if spec is None:
        return f"there is no module {module} in {folder}, and none is installed"
    return _why_undefined(spec, attribute)


def importable_from(folder: Path) -> None:
    """Let functions be imported from a folder, after everything that is installed.

    A folder in it that holds no Python (a model repository named ``triton``) is no package: a
    library that looks whether one of that name is installed would take it for one.
    """
    place = str(folder.absolute())
    sys.path_importer_cache[place] = _PythonFinder(place, *_LOADERS)
    if place not in sys.path:
        sys.path.append(place)


class _PythonFinder(FileFinder):
    """Finds modules and packages of a folder, and namespace packages that hold any."""

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        found = super().find_spec(fullname, target)
        if found is None or found.loader is not None:
            return found
        places = [Path(place) for place in found.submodule_search_locations or ()]
        holds = any(next(p.glob("*.py"), next(p.glob("*/__init__.py"), None)) for p in places)
        return found if holds else None


def _find(module: str, folders: Sequence[str]) -> ModuleSpec | None:
    """Where a module is, without importing the packages it is in."""
    found: ModuleSpec | None = None
    search: Sequence[str] | None = folders
    parts = module.split(".")
    for place in range(len(parts)):
        if search is None:
            return None
        name = ".".join(parts[: place + 1])
        found = PathFinder.find_spec(name, search) or _by_other_finders(name, search, top=not place)
        if found is None:
            return None
        search = found.submodule_search_locations
    return found


def _by_other_finders(name: str, search: Sequence[str], *, top: bool) -> ModuleSpec | None:
    """What is built in, frozen, or installed in place has a finder of its own."""
    for finder in sys.meta_path:
        spec = finder.find_spec(name, None if top else search)
        if spec is not None:
            return spec
    return None


def _why_undefined(spec: ModuleSpec, attribute: str) -> str:
    path = Path(spec.origin or "")
    if path.suffix != ".py" or not path.is_file():
        return ""
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        return f"{path} is not Python: {error}"
    except RecursionError:
        return ""
    if attribute in set(_names(tree.body)) or _is_dynamic(tree):
        return ""
    return f"{path} defines no {attribute}"


def _is_dynamic(tree: ast.Module) -> bool:
    """Whether names may come to be in ways that reading does not show."""
    stars = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    called = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    lazily = "__getattr__" in set(_names(tree.body))
    return lazily or bool(called & _DYNAMIC) or any(n.names[0].name == "*" for n in stars)


def _names(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Names that a module's statements bind, whichever branch is taken."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Import() | ast.ImportFrom():
                yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
            case _:
                yield from _bound(node)


def _bound(node: ast.stmt) -> Iterator[str]:
    blocks = ("body", "orelse", "finalbody", "handlers", "cases")
    nested = [each for name in blocks for each in getattr(node, name, [])]
    if not nested:
        yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and _is_stored(n))
        return
    for each in nested:
        yield from _names([each]) if isinstance(each, ast.stmt) else _names(each.body)


def _is_stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)
