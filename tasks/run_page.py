"""What Prefect's pages show of a run besides its log: its name, and its artifacts.

An artifact is for people. So a server that does not take one is logged once and left alone for a
while, and the run goes on; and where Prefect's server lives inside this process alone, nobody will
ever open its pages, and nothing is sent.

A run that is retried, or resumed in another process, updates the artifacts it left before.
"""

import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
)
from prefect.client.schemas.objects import Artifact as StoredArtifact
from prefect.client.schemas.sorting import ArtifactSort
from prefect.context import FlowRunContext
from prefect.runtime import flow_run, task_run
from prefect.settings import PREFECT_API_URL

from enginegate.candidate import Engine, RegistryUri, Unbuilt
from enginegate.content_store import ContentFolder
from enginegate.errors import EnginegateError
from enginegate.messages import escape_markdown
from enginegate.policy.model_source import ModelSource
from enginegate.records import sha256_bytes
from enginegate.redact import masked
from tasks.prefect_server import REFUSALS, HeldClient, quick_client

# Between two loads of a benchmark somebody waits for this answer.
_PROGRESS_ANSWER_S = 1.0
# More updates than this would be seen by nobody.
_UPDATE_EVERY_S = 1.0
# A server that was away is asked again after so long: each try may cost an answer's wait.
_LEFT_ALONE_S = 60.0
_NOT_YET_DONE = 99.0
_LONGEST_VERSION = 40
# Of a key's history: repositories of one model, such as staging and production, share its key.
_LOOKED_BACK = 50
_PLACE = "enginegate.place"
_log = logging.getLogger("enginegate.run_page")


@dataclass(frozen=True, slots=True)
class RunArtifact:
    """One artifact of a run.

    Attributes:
        key: its name on Prefect's page of artifacts; one key's artifacts are a history.
        kind: Prefect's type.
        data: Markdown, JSON of a table's rows, or per cent.
        description: Markdown; shown above the data.
        place: what the artifact is about, where several places share a key; not shown.
    """

    key: str
    kind: Literal["markdown", "table", "progress"]
    data: str | float
    description: str = ""
    place: str = ""


@dataclass(slots=True)
class _Reach:
    """Whether Prefect's server took what it was last sent by this process."""

    alone_until_s: float = 0.0
    logged: bool = False

    @property
    def may_ask(self) -> bool:
        return time.monotonic() >= self.alone_until_s

    def failed(self, error: Exception) -> None:
        self.alone_until_s = time.monotonic() + _LEFT_ALONE_S
        if not self.logged:
            why = masked(str(error)) or type(error).__name__
            _log.warning("Prefect's pages may lack artifacts or names of this run: %s", why)
        self.logged = True

    def answered(self) -> None:
        self.alone_until_s, self.logged = 0.0, False


_reach = _Reach()


def artifact_key(*parts: str) -> str:
    """A key of lower case, digits and dashes, which is all that Prefect allows.

    Names that only differ otherwise stay apart: such a name's digest is added.
    """
    text = "-".join(parts)
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return plain if plain == text else f"{plain}-{sha256_bytes(text.encode())[:6]}"


# Prefect's type for what names a task's runs asks for a method that no function has: hence Any.
def of_candidate(step: str) -> Any:
    """Names a task's runs after the candidate whose engine it is given as ``attempt``."""

    def name(parameters: dict[str, Any]) -> str:
        attempt: ContentFolder[Engine] | Unbuilt = parameters["attempt"]
        built = attempt if isinstance(attempt, Unbuilt) else attempt.value
        return f"{step}-{built.candidate}"

    return name


def of_version(step: str) -> Any:
    """Names a task's runs after the version of the model that it is given as ``model``."""

    def name(parameters: dict[str, Any]) -> str:
        source: ModelSource = parameters["model"]
        found = RegistryUri.parse(source.uri)
        words = model_version(found.name if found else "", source.uri)
        return f"{step}-{re.sub(r'[^A-Za-z0-9.@_]+', '-', words.strip())}"

    return name


def model_version(model: str, uri: str) -> str:
    """``digits v3``; ``digits @candidate`` for an alias, the last part of any other address."""
    found = RegistryUri.parse(uri)
    if found is None:
        return f"{model} {uri.rstrip('/').rpartition('/')[2][-_LONGEST_VERSION:]}"
    return f"{model} @{found.alias}" if found.version is None else f"{model} v{found.version}"


def rename_run(name: str) -> None:
    """Name the flow run that this is part of, once more is known than when it began."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or context.flow_run.name == name:
        return
    with _server() as client:
        if client is not None:
            client.set_flow_run_name(context.flow_run.id, name)
            context.flow_run.name = name


def leave_artifacts(artifacts: Sequence[RunArtifact]) -> None:
    """Show artifacts on the page of the run; those that it left before are updated."""
    run = flow_run.id
    if run is None:
        return
    with _server() as client:
        if client is None:
            return
        mine = {each.key: each.id for each in _of_run(client, UUID(str(run)))}
        for artifact in artifacts:
            _put(client, artifact, mine.get(artifact.key))


def extend_history(artifact: RunArtifact) -> None:
    """Add an artifact to its key's history, unless the newest of its place says the same.

    That one is updated instead, so that a place has one entry for each change of its description.
    """
    if flow_run.id is None:
        return
    with _server() as client:
        if client is None:
            return
        newest = client.read_artifacts(
            artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[artifact.key])),
            sort=ArtifactSort.CREATED_DESC,
            limit=_LOOKED_BACK,
        )
        here = [each for each in newest if (each.metadata_ or {}).get(_PLACE) == artifact.place]
        same = bool(here) and here[0].description == artifact.description
        _put(client, artifact, here[0].id if same else None)


@dataclass(slots=True)
class ProgressBar:
    """A progress artifact, updated between two loads of a benchmark and never during one.

    A thread of its own would send while the next load is measured.

    Attributes:
        key: the artifact's.
        title: what is in progress, in Markdown.
    """

    key: str
    title: str
    _id: UUID | None = field(default=None, init=False)
    _per_cent: float = field(default=0.0, init=False)
    _sent_s: float = field(default=float("-inf"), init=False)
    _held: HeldClient = field(
        default_factory=lambda: HeldClient(_PROGRESS_ANSWER_S), init=False, repr=False
    )

    def update(self, share: float, words: str) -> None:
        """Show how much is done; less often than asked where that would be too often.

        Args:
            share: of the work, 0 to 1; never shown to go back, nor to be all before `finish`.
            words: what was done last.
        """
        self._per_cent = max(self._per_cent, min(_NOT_YET_DONE, 100.0 * share))
        if time.monotonic() - self._sent_s >= _UPDATE_EVERY_S:
            self._send(words)

    def finish(self, words: str) -> None:
        """Show that it is done, and what came of it."""
        self._per_cent = 100.0
        self._send(words)
        self._held.close()

    def _send(self, words: str) -> None:
        run = flow_run.id
        if run is None:
            return
        text = f"{self.title}: {escape_markdown(words)}"
        artifact = RunArtifact(self.key, "progress", round(self._per_cent, 1), text)
        with _server(self._held) as client:
            if client is None:
                return
            if self._id is None:
                # An earlier attempt of this run has begun it.
                mine = {each.key: each.id for each in _of_run(client, UUID(str(run)))}
                self._id = mine.get(self.key)
            self._id = _put(client, artifact, self._id)
        self._sent_s = time.monotonic()


@contextmanager
def _server(held: HeldClient | None = None) -> Iterator[SyncPrefectClient | None]:
    """A client; None where there is no server that anybody sees, or it was just away.

    What goes wrong with it ends the block and no more.
    """
    if not PREFECT_API_URL.value() or not _reach.may_ask:
        yield None
        return
    try:
        with held.asking() if held else quick_client() as client:
            yield client
    except (EnginegateError, *REFUSALS) as error:
        _reach.failed(error)
    else:
        _reach.answered()


def _of_run(client: SyncPrefectClient, run: UUID) -> list[StoredArtifact]:
    """A run's artifacts, oldest first, so that of a key the newest counts."""
    return client.read_artifacts(
        artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run])),
        sort=ArtifactSort.CREATED_DESC,
    )[::-1]


def _put(client: SyncPrefectClient, artifact: RunArtifact, known: UUID | None) -> UUID:
    content: dict[str, Any] = {"data": artifact.data, "description": artifact.description}
    if known is not None:
        client.update_artifact(known, ArtifactUpdate(**content))
        return known
    made = client.create_artifact(
        ArtifactCreate(
            key=artifact.key,
            type=artifact.kind,
            flow_run_id=UUID(str(flow_run.id)),
            task_run_id=UUID(str(task_run.id)) if task_run.id else None,
            metadata_={_PLACE: artifact.place} if artifact.place else None,
            **content,
        )
    )
    return made.id
