"""A project as it is found on a machine: a policy, two releases, a workspace with keys."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from enginegate.backup import BackupPlaces, RepositoryPlace, RestorePlaces
from enginegate.policy.operating import Signing
from enginegate.repository import Layout, LiveRepository, ReleaseSigning, record_decision
from enginegate.workspace import Workspace
from tests.fakes.evidence import decision, scorecard
from tests.fakes.live_triton import FakeTriton, package_in

_POLICY = Path(__file__).parents[2] / "policies" / "digits.toml"
LIVE = ".enginegate/live/digits"


@dataclass(frozen=True)
class Project:
    """One project below ``root``."""

    root: Path
    repository: LiveRepository

    @classmethod
    def at(cls, root: Path) -> "Project":
        """The project in a folder, with a server that loaded nothing yet."""
        live, signing = root / LIVE, ReleaseSigning.of(Signing(), Workspace(root / ".enginegate"))
        live.mkdir(parents=True, exist_ok=True)
        return cls(
            root, LiveRepository(live, FakeTriton(live), load_timeout_s=1.0, signing=signing)
        )

    @property
    def workspace(self) -> Workspace:
        return Workspace(self.root / ".enginegate")

    @property
    def places(self) -> BackupPlaces:
        """What a backup of it is of."""
        return BackupPlaces(
            project=self.root,
            workspace=self.workspace,
            repositories=(RepositoryPlace(LIVE, self.root / LIVE),),
            files={"policies/digits.toml": self.root / "policies" / "digits.toml"},
            private_keys={},
        )

    def publish(self, offset: float, model_code: str = "") -> None:
        """Publish one more release; its model adds ``offset``."""
        package = package_in(self.root.parent, offset)
        if model_code:
            package.files["model.py"].write_text(model_code)
        current = Layout(self.repository.root, "digits").current()
        self.repository.publish(package, expected=current.version if current else None)


def published_project(root: Path, model_code: str = "") -> Project:
    """Two releases, signed with the workspace's own key; a scorecard and its approval."""
    (root / "policies").mkdir(parents=True)
    text = re.sub(r'repository = ".*"', f'repository = "{LIVE}"', _POLICY.read_text())
    (root / "policies" / "digits.toml").write_text(text)
    project = Project.at(root)
    workspace, live = project.workspace, project.repository.root
    project.publish(1.0, model_code)
    project.publish(2.0, model_code)
    card = scorecard()
    workspace.save_scorecard(card)
    answer = decision(card)
    workspace.save_decision(answer)
    record_decision(live, answer, "digits")
    engine = workspace.engines / ("e" * 64)
    engine.mkdir(parents=True)
    (engine / "engine.bin").write_bytes(b"plan" * 4096)
    (workspace.engines / f".{'e' * 64}.lock").write_text("pid 1 since then\n")
    workspace.shadow.mkdir(mode=0o700)
    (workspace.shadow / "requests.npz").write_bytes(b"of users")
    (workspace.root / "mlflow.db").write_bytes(b"SQLite")
    return project


def restored_to(root: Path) -> RestorePlaces:
    """Where a restore into a folder goes."""
    return RestorePlaces(root, Workspace(root / ".enginegate"))


def contents(root: Path, wanted: Callable[[Path], bool] = lambda _: True) -> dict[str, object]:
    """Every file's bytes and permissions, and every folder's permissions, by path."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        if wanted(path):
            mode = path.stat().st_mode & 0o777
            content = path.read_bytes() if path.is_file() else b""
            found[path.relative_to(root).as_posix()] = (mode, content)
    return found
