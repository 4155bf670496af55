"""Following what is live in object storage, on a host that does not promote."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from enginegate.errors import PolicyError
from enginegate.policy import read_policy
from enginegate.repository import open_target
from enginegate.workspace import Workspace

_out = Console(highlight=False, markup=False, emoji=False)


def pull(policy: Annotated[Path, typer.Argument(help="the model family's policy")]) -> None:
    """Bring this host to what is live in object storage: fetch, check, load, prove."""
    rules = read_policy(policy)
    storage = open_target(rules.live_tables, Workspace.of(rules), way="command").storage
    if storage is None:
        raise PolicyError(f"{policy} names no target.objects, so there is nothing to pull.")
    release = storage.pull()
    where = storage.store.url
    if release is None:
        _out.print(f"Nothing of {rules.name} is live in {where}.", soft_wrap=True)
    else:
        said = f"Release {release.version} of {rules.name} is live here, as in {where}."
        _out.print(said, soft_wrap=True)
