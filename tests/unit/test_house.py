"""The shape of the code: one name in one place, folders and import chains that a reader can hold.

A rule's exceptions are listed beside it. Take an entry out when its code is mended.
"""

import ast
from collections import defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("src/enginegate", "flows", "tasks", "validation")
MOST_MODULES = 18
LONGEST_CHAIN = 8

# Triton's Python backend asks for the first, our model file asks each kind's module for the second;
# programs of one file have the third.
REQUIRED_NAMES = {"TritonPythonModel", "open_for_triton", "main"}
# The Python API calls each flow by the flow's name, and the flow is what does it.
SHARED_NAMES = {"promote", "qualify", "rollback"}
LONGER_CHAINS: dict[str, int] = {}
LARGER_FOLDERS: dict[str, int] = {}
# The flows open the policy, commands show it, the pre-flight compares it with what is here, and a
# workspace belongs to its project. Everything else gets the tables that decide it.
POLICY_READERS = (
    "enginegate.cli",
    "enginegate.policy",
    "enginegate.preflight",
    "enginegate.workspace",
    "flows",
    "tasks.build",
)
OTHER_POLICY_READERS: set[str] = set()


@cache
def modules() -> dict[str, ast.Module]:
    """Every module by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[1:] if parts[0] == "src" else parts)
            found[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


def room_of(module: str) -> str:
    """``enginegate.search`` for its modules; a module without a room is its own."""
    return ".".join(module.split(".")[: 2 if module.startswith("enginegate") else 1])


def imported(module: ast.Module) -> set[str]:
    """What a module imports, wherever; not what only a type checker sees."""
    unseen = {
        inner
        for node in ast.walk(module)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    names = set()
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module and node not in unseen:
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {path if path in modules() else node.module for path in paths}
        elif isinstance(node, ast.Import) and node not in unseen:
            names |= {alias.name for alias in node.names}
    return names


def longest_chain(graph: dict[str, set[str]], packages: set[str]) -> tuple[str, ...]:
    """The longest path of imports; a package only passes names on, and is no step of it."""
    chains: dict[str, tuple[str, ...]] = {}
    for name in TopologicalSorter(graph).static_order():
        below = max((chains[each] for each in graph[name]), key=len, default=())
        chains[name] = below if name in packages else (name, *below)
    return max(chains.values(), key=len)


def annotations(module: ast.Module) -> set[str]:
    """The names that parameters and fields are annotated with."""
    found = [n.annotation for n in ast.walk(module) if isinstance(n, ast.arg | ast.AnnAssign)]
    return {n.id for each in found if each for n in ast.walk(each) if isinstance(n, ast.Name)}


def test_public_name_stands_in_one_module():
    """Who searches for a class or a function finds one."""
    places = defaultdict(list)
    for name, module in modules().items():
        for node in module.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                places[node.name].append(name)

    twice = {
        name: where
        for name, where in places.items()
        if len(where) > 1 and not name.startswith("_") and name not in REQUIRED_NAMES
    }

    assert {name: where for name, where in twice.items() if name not in SHARED_NAMES} == {}


def test_no_folder_has_more_modules_than_a_reader_keeps_apart():
    folders = {
        str(folder.relative_to(ROOT)): len(list(folder.glob("*.py")))
        for package in PACKAGES
        for folder in (ROOT / package, *(ROOT / package).rglob("*/"))
    }

    larger = {f: n for f, n in folders.items() if n > LARGER_FOLDERS.get(f, MOST_MODULES)}
    assert larger == {}


@pytest.mark.parametrize("room", sorted({room_of(name) for name in modules()}))
def test_import_chains_inside_a_room_are_short(room):
    """From a room's first module to its last there are few to open on the way."""
    inside = {name for name in modules() if room_of(name) == room}
    packages = {name for name in inside if any(n.startswith(f"{name}.") for n in inside)}
    graph = {name: (imported(modules()[name]) & inside) - {name} for name in inside}

    chain = longest_chain(graph, packages)

    limit = LONGER_CHAINS.get(room, LONGEST_CHAIN)
    assert len(chain) <= limit, " -> ".join(chain)


def test_only_flows_and_commands_open_the_policy():
    """A signature says which tables decide what a function does."""
    readers = {name for name, module in modules().items() if "Policy" in annotations(module)}

    others = {name for name in readers if not name.startswith(POLICY_READERS)}

    assert others == OTHER_POLICY_READERS
