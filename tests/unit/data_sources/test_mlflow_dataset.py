"""A dataset that an MLflow run logged is read from where its description says."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from enginegate.data_sources import load_data, mlflow_dataset
from enginegate.data_sources.mlflow_dataset import fetched_dataset
from enginegate.errors import DataError


@pytest.fixture
def logged(monkeypatch):
    """What a run's datasets are described as."""

    def log(source, *, kind="local", name="patients"):
        dataset = SimpleNamespace(
            name=name, digest="d1", source_type=kind, source=json.dumps(source)
        )
        monkeypatch.setattr(mlflow_dataset, "_logged", lambda *_: dataset)

    return log


def fetched(source, tmp_path):
    return fetched_dataset(
        source("mlflow:r/patients"), tmp_path / "store", tracking_uri="sqlite://"
    )


def test_file_on_this_machine_is_read_in_place(logged, source, tmp_path):
    """By an absolute path, an address, or one from the policy's project."""
    np.savez(tmp_path / "e v.npz", **{"input.x": np.zeros((2, 3), np.float32)})
    where = tmp_path / "e v.npz"

    for uri in (str(where), where.as_uri(), "e v.npz"):
        logged({"uri": uri})
        assert len(load_data(source("mlflow:r/patients"))) == 2


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"uri": "../../etc/passwd"}, "may not contain"),
        ({"uri": "/nowhere/e.npz"}, "is not there on this machine"),
        ({"uri": "file://elsewhere/e.npz"}, "on another machine"),
        ({"uri": "https://example.com/e.npz?token=abc"}, "which is not fetched"),
        ({"tags": {"mlflow.user": "a"}}, "does not say where its data is"),
        (["uri"], "does not say where its data is"),
        ({"path": "org/dataset", "split": "test"}, "does not say where its data is"),
    ],
)
def test_source_that_is_not_opened(logged, source, tmp_path, described, message):
    """Nothing leaves this machine, and nothing above the project is read by a relative path."""
    logged(described)

    with pytest.raises(DataError, match=message):
        fetched(source, tmp_path)
