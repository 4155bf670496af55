"""Blocks with known content, and a place to keep samples."""

from datetime import UTC, datetime

import numpy as np
import pytest

from enginegate.shadow.record_batch import RecordBatch
from enginegate.shadow.redaction import Preparation
from enginegate.shadow.sample import SampleOrigin
from enginegate.shadow.store import new_sample

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)


@pytest.fixture
def block_of():
    """Make the rows of one request; each argument changes one column."""

    def make(rows=1, *, shape=(4,), at=0, **changes):
        numbers = np.arange(rows * int(np.prod(shape)), dtype=np.float32).reshape(rows, *shape)
        fields = {
            "inputs": {"x": numbers + at},
            "outputs": {"y": 2 * (numbers + at)},
            "requests": np.zeros(rows, np.int64),
            "request_ids": np.full(rows, f"r{at}"),
            "arrival_ns": np.full(rows, 1_000_000_000 + at * 1_000_000, np.int64),
            "model_versions": np.full(rows, 3, np.int64),
            "stages_us": {
                stage: np.full(rows, float(at)) for stage in ("queue", "input", "infer", "output")
            },
            "labels": np.full(rows, -1, np.int64),
        }
        return RecordBatch(**(fields | changes))

    return make


@pytest.fixture
def home(tmp_path):
    return tmp_path / "shadow"


@pytest.fixture
def kept(home):
    """Keep blocks as a sample; gives its folder."""

    def keep(*blocks, preparation=None, name="m-1", model="m", when=NOW, one_in=1):
        origin = SampleOrigin("a test", model, when, one_in)
        with new_sample(home / name, origin, preparation or Preparation()) as writer:
            for block in blocks:
                writer.add(block)
        return home / name

    return keep
