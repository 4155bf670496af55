"""A model of this program's own on a server, under a name of its own; removed at the end.

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

WORKING_SOURCE = Path(__file__).with_name("probe_model_server.py").read_bytes()
BROKEN_SOURCE = b"raise RuntimeError('broken on purpose, to see that it stays outside')\n"
_DIGEST = "enginegate.release.contract"
_SERVING = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)
_X = TensorSpec(name="x", dtype="float32", shape=(-1, 1))
_Y = TensorSpec(name="y", dtype="float32", shape=(-1, 3))
_POLL_S = 0.02
_UNLOADED_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """One answer.

    Attributes:
        triton_version: the version that Triton names.
        version: the version that the model itself names.
        load: another number after every load of that version.
    """

    triton_version: str
    version: int
    load: int


@dataclass(slots=True)
class ProbeModel:
    """The model and its two versions.

    Attributes:
        repository: a folder that the server reads; None: files travel in the call.
        load_timeout_s: limit on one load.
        sources: content of each version's ``model.py``.
        digests: of releases by version, which its configuration carries as a release's does.
    """

    client: TritonClient
    repository: Path | None
    load_timeout_s: float
    name: str = field(default_factory=lambda: f"enginegate-contract-{uuid.uuid4().hex[:8]}")
    sources: dict[int, bytes] = field(default_factory=lambda: dict.fromkeys((1, 2), WORKING_SOURCE))
    digests: dict[int, str] = field(default_factory=dict)

    def add_release(self, number: int) -> None:
        """Name the digest of another release from now on, and write a record of it."""
        digest = sha256(str(number).encode()).hexdigest()
        self.digests = {**self.digests, number: digest}
        if self.repository is not None:
            write_file(self.repository / self.name / RECORDS / str(number), digest.encode())

    def serve(self, *versions: int, digest: str = "first", write: bool = True) -> float:
        """Have exactly these versions served.

        Args:
            versions: for Triton's ``specific`` policy.
            digest: a parameter of the configuration.
            write: false leaves the files in the folder untouched.

        Returns:
            Seconds that the call took.

        Raises:
            ServerError: it did not load.
        """
        config = model_config(
            name=self.name,
            inputs=(_X,),
            outputs=(_Y,),
            serving=_SERVING,
            backend="python",
            parameters={_DIGEST: digest},
            versions=versions,
        )
        write_labels(config, self.digests)
        files: Mapping[str, bytes] = {}
        if self.repository is None:
            files = {f"{version}/model.py": source for version, source in self.sources.items()}
        elif write:
            self._write(self.repository / self.name, config)
        began_s = time.perf_counter()
        self.client.load(self.name, config, files=files, timeout_s=self.load_timeout_s)
        return time.perf_counter() - began_s

    def infer(self, version: str = "") -> ProbeAnswer:
        """Send one request; without a version Triton chooses."""
        reply = self.client.infer(self.name, {"x": np.zeros((1, 1), np.float32)}, version=version)
        _, answered_by, load = reply.outputs["y"][0].tolist()
        return ProbeAnswer(reply.model_version, int(answered_by), int(load))

    def ready_versions(self) -> set[int]:
        """Versions that answer; where there is a folder, the index must list the same.

        Triton does not list a model in its index whose files travelled in the call.
        """
        ready = {each for each in self.sources if self.client.model_ready(self.name, str(each))}
        if self.repository is None:
            return ready
        rows = self.client.index()
        listed = {row.version for row in rows if row.name == self.name and row.ready}
        return ready if ready == listed else ready ^ listed

    def labels_in_force(self) -> dict[int, str]:
        """Release digests that the configuration in force names."""
        return read_labels(self.client.config(self.name))

    def digest_in_force(self) -> str | None:
        """The digest parameter of the configuration in force."""
        return self.client.parameters(self.name).get(_DIGEST)

    def unload(self) -> None:
        """Unload it and wait until it is gone; a dead server has nothing."""
        deadline = time.monotonic() + _UNLOADED_WITHIN_S
        with suppress(ServerError):
            self.client.unload(self.name)
            while self._is_present() and time.monotonic() < deadline:
                time.sleep(_POLL_S)

    def remove(self) -> None:
        """Leave nothing, on the server or in the folder."""
        self.unload()
        if self.repository is not None:
            shutil.rmtree(self.repository / self.name, ignore_errors=True)

    def _write(self, folder: Path, config: Config) -> None:
        for version, source in self.sources.items():
            path = folder / str(version) / "model.py"
            if not path.is_file() or path.read_bytes() != source:
                write_file(path, source)
                # As in a release: bytecode written here by a load would count as a change of it.
                write_file(path.with_name("__pycache__"), b"")
        write_file(folder / "config.pbtxt", config_text(config).encode())

    def _is_present(self) -> bool:
        states = {row.state for row in self.client.index() if row.name == self.name}
        return bool(states & {"READY", "LOADING", "UNLOADING"}) or bool(self.ready_versions())
