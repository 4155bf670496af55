"""MLflow as this program uses it: evidence in, registry versions and aliases out."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from enginegate.candidate import Candidate, RegistryUri
from enginegate.decision import Promise, Release
from enginegate.errors import ModelError
from enginegate.evidence import Scorecard
from enginegate.repository.history.broken_promises import ShownState
from enginegate.sources.mlflow_server import check_answers
from enginegate.tracking.connection import Connection
from enginegate.tracking.live_checks import log_check, watch_run
from enginegate.tracking.page_filing import PageMaker
from enginegate.tracking.scorecard_logger import CandidateArtifacts, ScorecardLogger
from enginegate.tracking.ui_links import ComparisonLink, comparison_of
from enginegate.watch.log import WatchCheck

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel

_LISTED = 20
# Versions asked for at once: a page of MLflow costs it a query, and this process its memory.
_PAGE = 1000
_NO_FILES: Mapping[str, bytes] = MappingProxyType({})
_NO_PARAMS: Mapping[str, str] = MappingProxyType({})
_NO_FURTHER: Mapping[str, Mapping[Candidate, CandidateArtifacts]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Tracker:
    """MLflow at a tracking URI. Making one does nothing; the first call connects.

    Every method raises `TrackingError` where MLflow cannot be reached, or refuses.

    Attributes:
        tracking_uri: a database such as ``sqlite:////data/mlflow.db``, or a server's ``http://``.
        artifact_root: folder of the artifacts; a tracking server ignores it and uses its own.
    """

    tracking_uri: str
    artifact_root: Path

    @property
    def connection(self) -> Connection:
        """Every call goes through it."""
        return Connection(self.tracking_uri, self.artifact_root)

    @property
    def client(self) -> "MlflowClient":
        """MLflow's own client, for what this class does not cover."""
        return self.connection.client

    def resolve(self, uri: str) -> str:
        """``models:/NAME@ALIAS`` or ``models:/NAME/VERSION`` as the version it means now.

        Raises:
            ModelError: there is no such model, version or alias; the message lists what there is.
        """
        named = RegistryUri.parse(uri)
        if named is None:
            raise ModelError(
                f"{uri!r} does not name a registered model. "
                "Give models:/NAME/VERSION or models:/NAME@ALIAS."
            )
        name = named.name
        model = self._model(name)
        if model is None:
            raise ModelError(
                f"There is no model {name!r} in the registry at {self.connection.shown_uri}. "
                f"It holds: {self._model_names()}.\n"
                "Register the model there, or give another tracking URI."
            )
        versions = self._versions(name)
        version = str(named.version or model.aliases.get(named.alias, ""))
        if version not in versions:
            aliases = ", ".join(f"{a} -> {v}" for a, v in sorted(model.aliases.items())) or "none"
            raise ModelError(
                f"{uri} is not in the registry at {self.connection.shown_uri}. "
                f"{name!r} has versions: {', '.join(versions) or 'none'}; aliases: {aliases}."
            )
        return str(RegistryUri(name, int(version)))

    def record(  # noqa: PLR0913
        self,
        scorecard: Scorecard,
        artifacts: Mapping[Candidate, CandidateArtifacts],
        *,
        report: str = "",
        files: Mapping[str, bytes] = _NO_FILES,
        params: Mapping[str, str] = _NO_PARAMS,
        make_page: PageMaker | None = None,
        further: Mapping[str, Mapping[Candidate, CandidateArtifacts]] = _NO_FURTHER,
    ) -> str:
        """File a scorecard and what belongs to it; returns the parent run's id.

        The scorecard is filed, and tagged by digest, with ``mlflow_run`` set to that run, whatever
        it was: `Scorecard.model_copy` with the same update gives the digest to approve. The same
        evidence again finds its finished run and writes nothing.

        Args:
            scorecard: all verdicts and benchmarks of one qualification.
            artifacts: files of each candidate; one without an entry has none.
            report: Markdown shown as the run's description and kept as ``report.md``.
            files: further files of the run, by their path in it.
            params: further parameters of the run, such as the policy's SLO, beside the limits.
            make_page: draws the decision page, which is filed at the run's root; None: there is
                none.
            further: files of each candidate on the scorecard's other kinds of device, by kind.

        Raises:
            TrackingError: MLflow refused part-way; the runs still open are marked FAILED.
            TamperedError: an engine's bytes are not what its manifest says.
        """
        logger = ScorecardLogger(
            self.connection, scorecard, artifacts, report, files, params, make_page, further
        )
        with self.connection.explained(f"record scorecard {scorecard.digest[:12]}"):
            return logger.record()

    def log_check(
        self, check: WatchCheck, release: Release, state: ShownState, promise: Promise
    ) -> str:
        """Log one check of a live release in the release's watch run; that run's id.

        Args:
            check: its numbers, one step.
            release: what was checked.
            state: what the run shows as the release's state.
            promise: that the release is held to now.
        """
        with self.connection.explained(f"log check {check.number} of release {release.version}"):
            return log_check(self.connection, check, release, state, promise)

    def watch_run(self, model: str, release_sha256: str) -> str | None:
        """The run of a release's checks; None: none was ever filed."""
        with self.connection.explained(f"look up the checks of {model!r}"):
            return watch_run(self.connection, model, release_sha256)

    def comparison(self, run_id: str, base: str = "") -> ComparisonLink:
        """Where the UI compares the candidates of a recorded scorecard.

        Args:
            run_id: the parent run.
            base: where a UI was started; empty: the server's own, or where `enginegate ui` starts
                one as a rule.

        Raises:
            TrackingError: MLflow cannot be reached, or knows no such run.
        """
        with self.connection.explained(f"find the run {run_id}"):
            experiment = self.client.get_run(run_id).info.experiment_id
            children = self.client.search_runs(
                [experiment],
                filter_string=f"tags.`mlflow.parentRunId` = '{run_id}'",
                order_by=["attributes.start_time ASC"],
            )
        ids = tuple(str(run.info.run_id) for run in children)
        return comparison_of(self.connection, experiment, run_id, ids, base)

    def register(
        self, model_name: str, model_id: str, *, run_id: str, tags: Mapping[str, str]
    ) -> int:
        """Register a logged model (``m-...``) as the next version; the version's number.

        Raises:
            TrackingError: MLflow cannot be reached, or does not have that logged model.
        """
        with self.connection.explained(f"register a version of {model_name!r}"):
            if self._model(model_name) is None:
                self.connection.made(lambda client: client.create_registered_model(model_name))
            made = self.client.create_model_version(
                model_name, self._source(model_id), run_id, dict(tags), model_id=model_id
            )
        return int(made.version)

    def _source(self, model_id: str) -> str:
        """MLflow resolves ``models:/m-...`` through the process's own default tracking URI, which
        is the right one on a server only."""
        if self.connection.is_server:
            return f"models:/{model_id}"
        return str(self.client.get_logged_model(model_id).artifact_location)

    def version_tags(self, model_name: str, version: int) -> dict[str, str] | None:
        """A registered version's tags; None when there is no such version."""
        with self.connection.explained(f"look up version {version} of {model_name!r}"):
            found = self.connection.found(
                lambda client: client.get_model_version(model_name, str(version))
            )
        return None if found is None else dict(found.tags)

    def versions_with(
        self, model_name: str, *, alias: str | None = None, tag: str | None = None
    ) -> tuple[int, ...]:
        """Versions that an alias stands for now, or that carry a tag; ascending, each once.

        Args:
            model_name: in the registry; a model that does not exist has no versions.
            alias: for example ``candidate``.
            tag: ``NAME``, whatever its value, or ``NAME=VALUE``.
        """
        found = {self.alias(model_name, alias)} - {None} if alias is not None else set()
        if tag is not None:
            name, wanted, value = tag.partition("=")
            with self.connection.explained(f"list the versions of {model_name!r}"):
                listed = tuple(self._all_versions(model_name))
            found |= {
                int(version.version)
                for version in listed
                if name in version.tags and (not wanted or version.tags[name] == value)
            }
        return tuple(sorted(number for number in found if number is not None))

    def alias(self, model_name: str, alias: str) -> int | None:
        """The version an alias stands for; None when the model or the alias does not exist."""
        model = self._model(model_name)
        version = model.aliases.get(alias) if model else None
        return None if version is None else int(version)

    def aliased(self, model_name: str) -> frozenset[int]:
        """Versions that any alias stands for now; none of a model that does not exist."""
        model = self._model(model_name)
        return (
            frozenset(int(version) for version in model.aliases.values()) if model else frozenset()
        )

    def move_alias(self, model_name: str, alias: str, version: int) -> None:
        """Let an alias stand for another version.

        Raises:
            TrackingError: MLflow cannot be reached, does not have that version, or keeps that alias
                for itself (``latest``, ``v1``).
        """
        with self.connection.explained(f"let {model_name}@{alias} stand for version {version}"):
            self.client.get_model_version(model_name, str(version))
            self.client.set_registered_model_alias(model_name, alias, str(version))

    def remove_alias(self, model_name: str, alias: str, version: int) -> None:
        """Let an alias stand for nothing, if it stands for this version now."""
        if self.alias(model_name, alias) == version:
            with self.connection.explained(
                f"take {alias!r} from version {version} of {model_name}"
            ):
                self.client.delete_registered_model_alias(model_name, alias)

    def tag_version(self, model_name: str, version: int, tags: Mapping[str, str]) -> None:
        """Write facts on a registered version, such as the release that serves it.

        Raises:
            TrackingError: MLflow cannot be reached, or does not have that version.
        """
        with self.connection.explained(f"tag version {version} of {model_name}"):
            for name, value in tags.items():
                self.client.set_model_version_tag(model_name, str(version), name, value)

    def has_run(self, run_id: str) -> bool:
        """Whether there is such a run."""
        with self.connection.explained(f"look up the run {run_id}"):
            return self.connection.found(lambda client: client.get_run(run_id)) is not None

    def filed_digest(self, run_id: str) -> str | None:
        """Digest of the scorecard that a qualification's run filed; None: there is no such run."""
        self.check_answers()
        with self.connection.explained(f"look up the run {run_id}"):
            run = self.connection.found(lambda client: client.get_run(run_id))
        if run is None or run.data.tags.get("kind") != "qualification":
            return None
        return str(run.data.tags.get("scorecard_sha256", ""))

    def tag_run(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Write facts on a run, such as who approved the scorecard that it filed.

        Raises:
            TrackingError: MLflow cannot be reached, or knows no such run.
        """
        with self.connection.explained(f"tag the run {run_id}"):
            for name, value in tags.items():
                self.client.set_tag(run_id, name, value)

    def check_answers(self) -> None:
        """Find out quickly that a tracking server is away or hangs: MLflow itself waits longer.

        Raises:
            TrackingError: nothing accepts a connection at its address, or nothing answers.
        """
        check_answers(self.tracking_uri)

    def _model(self, name: str) -> "RegisteredModel | None":
        with self.connection.explained(f"look up the model {name!r}"):
            return self.connection.found(lambda client: client.get_registered_model(name))

    def _versions(self, name: str) -> list[str]:
        with self.connection.explained(f"list the versions of {name!r}"):
            found = tuple(self._all_versions(name))
        return [str(number) for number in sorted(int(version.version) for version in found)]

    def _all_versions(self, name: str) -> "Iterator[ModelVersion]":
        """A page at a time: MLflow answers at most so many at once."""
        token = None
        while True:
            page = self.client.search_model_versions(
                f"name = '{name}'", max_results=_PAGE, page_token=token
            )
            yield from page
            token = page.token
            if not token:
                return

    def _model_names(self) -> str:
        with self.connection.explained("list the registered models"):
            found = self.client.search_registered_models(max_results=_LISTED)
        return ", ".join(sorted(model.name for model in found)) or "no model"
