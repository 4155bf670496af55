"""A model of our own on somebody's server, with a name that nobody else has; gone at the end.

Its files travel in the load call, so no folder is needed. With a folder that the server reads they
are written there instead, as a promotion does.
"""

import shutil
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import numpy as np

from enginegate.atomic_io import write_file
from enginegate.candidate import TensorSpec
from enginegate.errors import ServerError
from enginegate.serving import ServingConfig
from enginegate.triton.client import TritonClient
from enginegate.triton.config import Config, config_text, model_config
from enginegate.triton.release_labels import RECORDS, read_labels, write_labels

SOURCE = Path(__file__).with_name("probe_model_server.py")
BROKEN = b"raise RuntimeError('broken on purpose, to see that it stays outside')\n"
DIGEST = "enginegate.release.contract"
_SERVING = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)
_X = TensorSpec(name="x", dtype="float32", shape=(-1, 1))
_Y = TensorSpec(name="y", dtype="float32", shape=(-1, 3))
_POLL_S = 0.02
_GONE_S = 30.0


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """One answer: which version Triton says it is from, and what the model itself says.

    Attributes:
        load: a number that is another one after every load of that version.
    """

    header: str
    version: int
    load: int


@dataclass(slots=True)
class ProbeModel:
    """The model and its two versions.

    Attributes:
        repository: a folder that the server reads; None: files travel in the call.
        load_timeout_s: limit on one load.
        files: what the folder of each version holds as ``model.py``.
        releases: the digests that its configuration carries as a release's does.
    """

    client: TritonClient
    repository: Path | None
    load_timeout_s: float
    name: str = field(default_factory=lambda: f"enginegate-contract-{uuid.uuid4().hex[:8]}")
    files: dict[int, bytes] = field(
        default_factory=lambda: dict.fromkeys((1, 2), SOURCE.read_bytes())
    )
    releases: dict[int, str] = field(default_factory=dict)

    def issue(self, number: int) -> None:
        """Another release: its digest is named from now on, and a record of it is kept."""
        digest = sha256(str(number).encode()).hexdigest()
        self.releases = {**self.releases, number: digest}
        if self.repository is not None:
            write_file(self.repository / self.name / RECORDS / str(number), digest.encode())

    def serve(self, *versions: int, digest: str = "first", write: bool = True) -> float:
        """Let exactly these versions serve.

        Args:
            versions: for Triton's ``specific`` policy.
            digest: a parameter of the configuration.
            write: false leaves the files in the folder untouched.

        Returns:
            Seconds that the call took.

        Raises:
            ServerError: it did not load.
        """
        config = self.config(versions, digest)
        carried = self._write(config) if write else self._carried()
        began_s = time.perf_counter()
        self.client.load(self.name, config, files=carried, timeout_s=self.load_timeout_s)
        return time.perf_counter() - began_s

    def ask(self, version: str = "") -> ProbeAnswer:
        """One request; without a version Triton chooses."""
        reply = self.client.infer(self.name, {"x": np.zeros((1, 1), np.float32)}, version=version)
        _, told, load = reply.outputs["y"][0].tolist()
        return ProbeAnswer(reply.model_version, int(told), int(load))

    def ready(self) -> set[int]:
        """Versions that answer; where there is a folder, the index must say the same.

        Triton does not list a model in its index whose files travelled in the call.
        """
        answer = {each for each in self.files if self.client.model_ready(self.name, str(each))}
        if self.repository is None:
            return answer
        rows = self.client.index()
        listed = {row.version for row in rows if row.name == self.name and row.ready}
        return answer if answer == listed else answer ^ listed

    def named(self) -> dict[int, str]:
        """The releases that the configuration in force names."""
        return read_labels(self.client.config(self.name))

    def digest(self) -> str | None:
        """What the configuration in force says."""
        return self.client.parameters(self.name).get(DIGEST)

    def unload(self) -> None:
        """Take it off the server and wait until it is gone; a dead server has nothing."""
        deadline = time.monotonic() + _GONE_S
        with suppress(ServerError):
            self.client.unload(self.name)
            while self._present() and time.monotonic() < deadline:
                time.sleep(_POLL_S)

    def remove(self) -> None:
        """Leave nothing, on the server or in the folder."""
        self.unload()
        if self.repository is not None:
            shutil.rmtree(self.repository / self.name, ignore_errors=True)

    def config(self, versions: tuple[int, ...], digest: str) -> Config:
        """Its configuration."""
        config = model_config(
            name=self.name,
            inputs=(_X,),
            outputs=(_Y,),
            serving=_SERVING,
            backend="python",
            parameters={DIGEST: digest},
            versions=versions,
        )
        write_labels(config, self.releases)
        return config

    def _write(self, config: Config) -> Mapping[str, bytes]:
        if self.repository is None:
            return self._carried()
        folder = self.repository / self.name
        for version, content in self.files.items():
            path = folder / str(version) / "model.py"
            if not path.is_file() or path.read_bytes() != content:
                write_file(path, content)
                # As in a release: bytecode written here by a load would count as a change of it.
                write_file(path.with_name("__pycache__"), b"")
        write_file(folder / "config.pbtxt", config_text(config).encode())
        return {}

    def _carried(self) -> Mapping[str, bytes]:
        if self.repository is not None:
            return {}
        return {f"{version}/model.py": content for version, content in self.files.items()}

    def _present(self) -> bool:
        states = {row.state for row in self.client.index() if row.name == self.name}
        return bool(states & {"READY", "LOADING", "UNLOADING"}) or bool(self.ready())
