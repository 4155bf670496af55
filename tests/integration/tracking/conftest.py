"""A real MLflow database: making its tables takes seconds, so a module's tests share one."""

import pytest

from enginegate.tracking import Ledger


@pytest.fixture(scope="session")
def ledger(tmp_path_factory):
    """A ledger on SQLite with a local artifact folder and no server."""
    root = tmp_path_factory.mktemp("ledger")
    return Ledger(f"sqlite:///{root / 'mlflow.db'}", root / "artifacts")


@pytest.fixture
def registered(ledger):
    """Registers a version of a model, made of nothing but a file, and returns its number."""

    def register(name):
        experiment = ledger.connection.experiment("training/test")
        with ledger.connection.run(experiment, name, {}) as run:
            model = ledger.client.create_logged_model(experiment, name=name, source_run_id=run)
            ledger.client.finalize_logged_model(model.model_id, "READY")
        return ledger.register(name, model.model_id, run_id=run, tags={"recipe": "a"})

    return register
