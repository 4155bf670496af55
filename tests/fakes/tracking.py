"""MLflow's own functions pointed at a registry, for as long as a block takes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_ADDRESS = "MLFLOW_TRACKING_URI"


@contextmanager
def tracked_at(uri: str) -> Iterator[None]:
    """They log there in the block.

    MLflow writes the address to the environment too, where a workspace of the next test would
    find it.
    """
    import mlflow

    before = os.environ.get(_ADDRESS)
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(None)
        if before is not None:
            os.environ[_ADDRESS] = before
