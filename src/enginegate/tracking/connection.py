"""The way to MLflow: opened late, quiet, and every refusal explained."""

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from enginegate.errors import TrackingError
from enginegate.redact import link_base, log_if_slow, masked, masked_error
from enginegate.sources.mlflow_server import check_answers, set_mlflow_up

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment

R = TypeVar("R")

_REASON_LENGTH = 300
# Filing a scorecard with its engines takes seconds; longer than this, somebody wonders.
_SAID_AFTER_S = 15.0


@dataclass(frozen=True, slots=True)
class Connection:
    """A tracking URI, and where artifacts go when no server stands between.

    Attributes:
        tracking_uri: a database such as ``sqlite:////data/mlflow.db``, or a server's ``http://``.
        artifact_root: folder of the artifacts; a server chooses its own and ignores this one.
    """

    tracking_uri: str
    artifact_root: Path

    @property
    def is_server(self) -> bool:
        """Whether a tracking server stands between, which then decides where artifacts are."""
        return not re.match(r"(sqlite|postgresql|mysql|mssql)[+:]", self.tracking_uri)

    @property
    def shown_uri(self) -> str:
        """The tracking URI without a password or a token."""
        return masked(self.tracking_uri)

    @property
    def client(self) -> "MlflowClient":
        """The client; the first call on a new database creates its tables (two to five seconds)."""
        return _client(self.tracking_uri)

    def found(self, ask: "Callable[[MlflowClient], R]") -> R | None:
        """The answer of ``ask``; None where MLflow says that it does not exist."""
        try:
            return ask(self.client)
        except _mlflow_exception() as error:
            if getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise

    def made(self, make: "Callable[[MlflowClient], object]") -> None:
        """Let ``make`` make something, unless somebody else has made it meanwhile."""
        try:
            make(self.client)
        except _mlflow_exception() as error:
            if getattr(error, "error_code", "") != "RESOURCE_ALREADY_EXISTS":
                raise

    def experiment(self, name: str) -> str:
        """The id of the experiment of that name, made if there is none.

        Raises:
            TrackingError: MLflow cannot be reached, or the experiment was deleted.
        """
        with self.explained(f"open the experiment {name!r}"):
            found = self.client.get_experiment_by_name(name) or self._new_experiment(name)
        if found.lifecycle_stage != "active":
            raise TrackingError(
                f"The MLflow experiment {name!r} at {self.shown_uri} was deleted. Bring it back:\n"
                f"  mlflow experiments restore --experiment-id {found.experiment_id}"
            )
        return str(found.experiment_id)

    def _new_experiment(self, name: str) -> "Experiment":
        folder = self.artifact_root.absolute() / re.sub(r"[^A-Za-z0-9_-]+", "-", name)
        try:
            made = self.client.create_experiment(
                name, artifact_location=None if self.is_server else folder.as_uri()
            )
        except _mlflow_exception():
            found = self.client.get_experiment_by_name(name)
            if found is None:
                raise
            return found
        return self.client.get_experiment(made)

    @contextmanager
    def run(self, experiment: str, name: str, tags: Mapping[str, str]) -> Iterator[str]:
        """A new run's id; the run ends FINISHED with the block, FAILED if the block raises."""
        run = str(self.client.create_run(experiment, run_name=name, tags=dict(tags)).info.run_id)
        try:
            yield run
        except BaseException:
            with suppress(*_refusals()):
                self.client.set_terminated(run, "FAILED")
            raise
        self.client.set_terminated(run, "FINISHED")

    @contextmanager
    def explained(self, doing: str) -> Iterator[None]:
        """Turn what MLflow raises in the block into a TrackingError that says what to do.

        A server that does not answer is found out before the block, within seconds.
        """
        check_answers(self.tracking_uri)
        waiting = f"MLflow at {self.shown_uri} has not finished yet: {doing}"
        try:
            with log_if_slow(waiting, after_s=_SAID_AFTER_S):
                yield
        except _refusals() as error:
            lines = str(error).splitlines() or [type(error).__name__]
            raise TrackingError(
                f"MLflow at {self.shown_uri} could not {doing}: "
                f"{masked(lines[0])[:_REASON_LENGTH]}\n"
                f"{self._advice()}"
            ) from masked_error(error)

    def _advice(self) -> str:
        if self.tracking_uri.startswith("http"):
            return (
                f"See whether the server answers (curl {link_base(self.tracking_uri)}/health), or "
                "give another tracking URI. MLFLOW_HTTP_REQUEST_TIMEOUT is how many seconds it has "
                "for each answer."
            )
        if self.tracking_uri.startswith("sqlite"):
            return (
                f"The file must be an MLflow database, and its folder and {self.artifact_root} "
                "writable. Move a damaged file away to begin a new one."
            )
        return "Give a tracking URI that MLflow knows: sqlite:///FILE, postgresql://... or http://."


@cache
def _client(tracking_uri: str) -> "MlflowClient":
    set_mlflow_up()
    import mlflow  # noqa: PLC0415

    logging.getLogger("mlflow").setLevel(os.environ["MLFLOW_LOGGING_LEVEL"])
    return mlflow.MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)


def _mlflow_exception() -> type[Exception]:
    from mlflow.exceptions import MlflowException  # noqa: PLC0415

    return MlflowException


def _refusals() -> tuple[type[Exception], ...]:
    from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415

    return (_mlflow_exception(), SQLAlchemyError, OSError)
