"""Datasets of runs of a real MLflow."""

import json

import mlflow
import pandas as pd
import pytest
from mlflow.entities import Dataset, DatasetInput

from enginegate.data_sources import load_data
from enginegate.errors import DataError
from enginegate.policy.data import Data


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project whose MLflow is a database in it; and a run."""
    monkeypatch.delenv("ENGINEGATE_HOME", raising=False)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    mlflow.set_tracking_uri(uri)
    mlflow.create_experiment("trial", artifact_location=(tmp_path / "artifacts").as_uri())
    mlflow.set_experiment("trial")
    yield tmp_path
    mlflow.set_tracking_uri(None)


def load(project, written, **table):
    table = {"evaluation": written, **table}
    return load_data(Data.model_validate(table, context={"root": project}).evaluation)


def test_dataset_by_run(project):
    """Of a file on this machine, and of artifacts, which are copied once."""
    frame = pd.DataFrame({"age": [30.0, 40.0], "ill": [0, 1]})
    frame.to_parquet(project / "patients.parquet")
    with mlflow.start_run() as run:
        mlflow.log_artifact(str(project / "patients.parquet"), "deep/inside")
        here = project / "patients.parquet"
        logged = mlflow.data.from_pandas(frame, source=str(here), targets="ill", name="here")
        mlflow.log_input(logged, context="evaluation")
        mlflow.log_input(mlflow.data.from_pandas(frame, name="unnamed"))
    stored = f"runs:/{run.info.run_id}/deep/inside/patients.parquet"
    described = Dataset("stored", "d1", "artifact", json.dumps({"uri": stored}))
    mlflow.MlflowClient().log_inputs(run.info.run_id, [DatasetInput(described)])
    columns = {"inputs": {"x": {"columns": ["age"], "dtype": "float32"}}, "label": "ill"}

    found = [
        load(project, f"mlflow:{run.info.run_id}/{name}", columns=columns)
        for name in ("here", "stored", "stored")
    ]

    assert [each.labels.tolist() for each in found] == [[0, 1]] * 3
    assert len({each.sha256 for each in found}) == 1
    assert found[0].inputs["x"].tolist() == [30.0, 40.0]
    assert len(list((project / ".enginegate/store/data").glob("*/patients.parquet"))) == 1
    with pytest.raises(DataError, match="logged no dataset 'other'; it logged: here, stored"):
        load(project, f"mlflow:{run.info.run_id}/other")
    with pytest.raises(DataError, match="does not say where its data is"):
        load(project, f"mlflow:{run.info.run_id}/unnamed")
    with pytest.raises(DataError, match="has no run"):
        load(project, f"mlflow:{'0' * 32}/here")
