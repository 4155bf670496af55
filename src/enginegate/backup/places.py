"""Which folders and files a backup is of, and which of them it leaves out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from enginegate.workspace import Workspace

# Names in a workspace. What is here is made again, or belongs to a program with its own backup.
NOT_IN_A_BACKUP: Mapping[str, str] = MappingProxyType(
    {
        "keys/verified.key": "made again by the next verify",
        "logs": "logs of servers and builders",
        "mlartifacts": "MLflow's artifacts: copy the folder, as docs/backup.md says",
        "mlflow.db": "MLflow's database: keep it with its own tools, as docs/backup.md says",
        "prefect": "Prefect's database: keep it with its own tools, as docs/backup.md says",
        "running": "marks of runs that are under way here",
        "scratch": "files of servers that run only while something is measured",
        "shadow": "recorded requests, which their retention deletes; --shadow takes them in",
        "store/data": "copies of the policies' data, which are made again from it",
        "triton": "unpacked server files, which are made again",
        "verified": "what was verified on this disk; a restored one is verified whole",
    }
)
SHADOW = "shadow"
# What a file system itself leaves in the folder that it is mounted at.
OF_THE_DISK = frozenset({"lost+found"})
# SQLite's files beside a database are part of it.
_BESIDE_A_DATABASE = ("-journal", "-shm", "-wal")
# A live repository's files with such names are its record; others belong to whoever runs now.
RECORD_FILES = ".enginegate-"
_OF_THE_MOMENT = frozenset({".enginegate-server.json"})
# A log's index holds nothing that the log does not say, and counts only on the disk it was made on.
_INDEX = "-index.db"


@dataclass(frozen=True, slots=True)
class RepositoryPlace:
    """One live repository.

    Attributes:
        written: its folder as a policy says it; a relative one is below the project's folder.
        root: its folder here.
    """

    written: str
    root: Path


@dataclass(frozen=True, slots=True)
class BackupPlaces:
    """Everything that one project has on this machine.

    Attributes:
        project: folder that relative paths start from.
        workspace: where results are kept.
        repositories: each once, the primary of a fleet before its servers.
        files: policies and public keys, by their path below the project.
        private_keys: keys outside of the workspace's own folder, by their path below the project.
        elsewhere: what policies name that is left out -> why.
    """

    project: Path
    workspace: Workspace
    repositories: tuple[RepositoryPlace, ...]
    files: Mapping[str, Path]
    private_keys: Mapping[str, Path]
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    def secrets(self) -> dict[str, Path]:
        """Every private key that is here, by its name in a backup: these are encrypted."""
        own = sorted(path for path in self.workspace.keys.rglob("*") if path.is_file())
        places = {path: PurePosixPath(path.relative_to(self.workspace.root)) for path in own}
        kept = {f"workspace/{at}": path for path, at in places.items() if not _is_left_out(at)}
        return kept | {f"project/{name}": path for name, path in self.private_keys.items()}


def _is_left_out(place: PurePosixPath) -> bool:
    above = (place, *place.parents)[:-1]
    return any(why_left_out(each, shadow=True) is not None for each in above)


def why_left_out(place: PurePosixPath, *, shadow: bool) -> str | None:
    """Why a path of a workspace is not in a backup; None: it is, empty: that needs no word.

    Args:
        place: below the workspace.
        shadow: whether recorded requests were asked for.
    """
    name = place.as_posix()
    for suffix in _BESIDE_A_DATABASE:
        name = name.removesuffix(suffix) if name.startswith("mlflow.db") else name
    if name == SHADOW and shadow:
        return None
    if name in NOT_IN_A_BACKUP:
        return NOT_IN_A_BACKUP[name]
    return "" if is_left_over(place.name) else None


def is_left_over(name: str) -> bool:
    """Whether a name is that of a lock, of what a process is writing now, or of the disk itself."""
    return name.startswith(".") or name.endswith(".lock") or name in OF_THE_DISK


def is_of_the_moment(place: PurePosixPath) -> bool:
    """Whether a path of a live repository belongs to a process that runs, and to no release."""
    if len(place.parts) == 1 and place.name.startswith(RECORD_FILES):
        of_now = place.name.endswith(".lock") or place.name in _OF_THE_MOMENT
        return of_now or _INDEX in place.name
    return is_left_over(place.name)
