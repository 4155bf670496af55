"""A real MLflow database: making its tables takes seconds, so a module's tests share one."""

import pytest

from enginegate.tracking import Tracker


@pytest.fixture(scope="session")
def tracker(tmp_path_factory):
    """A tracker on SQLite with a local artifact folder and no server."""
    root = tmp_path_factory.mktemp("tracker")
    return Tracker(f"sqlite:///{root / 'mlflow.db'}", root / "artifacts")


@pytest.fixture
def registered(tracker):
    """Registers a version of a model, made of nothing but a file, and returns its number."""

    def register(name):
        experiment = tracker.connection.experiment("training/test")
        with tracker.connection.run(experiment, name, {}) as run:
            model = tracker.client.create_logged_model(experiment, name=name, source_run_id=run)
            tracker.client.finalize_logged_model(model.model_id, "READY")
        return tracker.register(name, model.model_id, run_id=run, tags={"recipe": "a"})

    return register
