"""What a benchmark sends."""

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from enginegate.candidate import TensorSpec
from enginegate.data import DataSet, write_data
from enginegate.data_sources import load_data
from enginegate.errors import DataError
from enginegate.policy import parse_policy, read_policy
from enginegate.policy.recording import Shadow
from enginegate.shadow import request_mix as mixes
from enginegate.shadow.redaction import Preparation
from enginegate.shadow.request_mix import request_mix

POLICY = Path(__file__).parents[3] / "policies" / "digits.toml"
LATER = datetime(2026, 11, 21, 12, tzinfo=UTC)
X = TensorSpec(name="x", dtype="float32", shape=(-1, 4))


@pytest.fixture
def written(tmp_path):
    """A data set whose every number is the one given; its path."""

    def write(name, number, inputs="x"):
        x = np.full((3, 4), number, np.float32)
        data = DataSet(name, {inputs: x}, None, np.arange(3).astype(np.str_), {})
        write_data(data, tmp_path / name)
        return str(tmp_path / name)

    return write


@pytest.fixture
def rules(written):
    """A policy for the model ``m``; each argument changes one table."""

    def make(**changes):
        raw = read_policy(POLICY).model_dump() | {"name": "m"}
        raw["data"] = {"evaluation": written("evaluation.npz", 1.0)}
        raw["shadow"] = None
        return parse_policy(raw | changes, "test")

    return make


def first(found):
    return float(found.data.inputs["x"].flat[0])


def test_recorded_sample_comes_with_its_sizes_and_times(rules, written, kept, block_of, home):
    """Requests of two rows stay requests of two rows, and arrivals can be replayed."""
    path = kept(block_of(2, at=5), block_of(1, at=9), block_of(2, at=13), one_in=10)
    data = {"evaluation": written("evaluation.npz", 1.0), "shadow": str(path)}

    found = request_mix(rules(data=data).traffic_tables, (X,), home)

    assert first(found) == 5.0
    assert found.batch_sizes == (1, 2, 2)
    np.testing.assert_allclose(found.arrivals_s, [0.0, 0.0004, 0.0008])


def test_inputs_named_under_shadow_have_no_times(rules, written, kept, block_of, home):
    """They are single requests; the newest recording is not looked at."""
    kept(block_of(at=7))
    shadow = {"traffic": written("traffic.npz", 2.0), "rate_per_s": 100.0}

    found = request_mix(rules(shadow=shadow).traffic_tables, (X,), home)

    assert (first(found), found.arrivals_s, found.batch_sizes) == (2.0, None, (1,))


def test_newest_recording_is_next(rules, kept, block_of, home):
    """With [shadow] and no traffic: what was recorded from live requests."""
    kept(block_of(at=7))

    found = request_mix(rules(shadow={}).traffic_tables, (X,), home)

    assert first(found) == 7.0
    assert found.arrivals_s is None


@pytest.mark.parametrize("shadow", [None, {}])
def test_without_any_the_evaluation_data_is_sent(rules, home, shadow):
    """There is always something real to send."""
    assert first(request_mix(rules(shadow=shadow).traffic_tables, (X,), home)) == 1.0


def test_withheld_input_falls_back_to_the_evaluation_data(rules, kept, block_of, home):
    """What was redacted cannot be sent again."""
    kept(block_of(at=7), preparation=Preparation.of(Shadow(drop=("x",))))

    assert first(request_mix(rules(shadow={}).traffic_tables, (X,), home)) == 1.0


def test_data_of_another_model_is_refused(rules, written, home):
    """Before a server is started."""
    data = {"evaluation": written("other.npz", 1.0, inputs="y")}

    with pytest.raises(DataError):
        request_mix(rules(data=data).traffic_tables, (X,), home)


def test_digest_tells_mixes_apart(rules, kept, block_of, home):
    """The same numbers in other requests, or at other times, are other traffic."""
    alone = request_mix(rules(shadow={}).traffic_tables, (X,), home / "none").sha256
    kept(block_of(2, at=5), block_of(1, at=9), name="m-1")
    together = request_mix(rules(shadow={}).traffic_tables, (X,), home).sha256
    kept(block_of(2, at=5), block_of(1, at=11), name="m-2", when=LATER)

    assert (
        len({alone, together, request_mix(rules(shadow={}).traffic_tables, (X,), home).sha256}) == 3
    )


def test_files_are_read_once_until_they_change(rules, written, home, monkeypatch):
    """All engines of a qualification get one mix; other types or other bytes make another."""
    reads = []

    def counted(path):
        reads.append(path)
        return load_data(path)

    monkeypatch.setattr(mixes, "load_data", counted)
    tables = rules(shadow={"traffic": written("traffic.npz", 3.0), "rate_per_s": 9}).traffic_tables

    both = [request_mix(tables, (X,), home) for _ in range(2)]
    assert both[0] is both[1]
    assert len(reads) == 1

    written("traffic.npz", 4.0)
    assert first(request_mix(tables, (X,), home)) == 4.0
    assert len(reads) == 2
