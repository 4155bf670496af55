"""One small set of samples, and how tests say where data is."""

import numpy as np
import pytest

from enginegate.policy.data import Data, DataColumns, ImageRules


@pytest.fixture
def arrays():
    """Twelve samples of one input, with a class, a slice and an id."""
    return {
        "input.x": np.arange(72, dtype=np.float32).reshape(12, 2, 3),
        "label": np.arange(12) % 3,
        "slice.light": np.array(["day", "night", "dusk"] * 4),
        "id": np.array([f"s{n}" for n in range(12)]),
    }


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A set below ``tmp_path`` with the rules of a [data] table, as a policy has it."""
    monkeypatch.delenv("ENGINEGATE_HOME", raising=False)

    def make(written, *, columns=None, images=None, allow_code=False):
        table = Data.model_validate(
            {
                "evaluation": str(written),
                "columns": DataColumns.model_validate(columns or {}),
                "images": ImageRules.model_validate(images or {}),
                "allow_code": allow_code,
            },
            context={"root": tmp_path},
        )
        return table.evaluation

    return make
