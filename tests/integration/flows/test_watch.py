"""The scheduled flow that looks after recorded traffic and the live repository."""

import shutil
from datetime import timedelta

import numpy as np
import pytest

from enginegate.errors import RepositoryError
from enginegate.recording import Shadow
from enginegate.shadow import import_sample
from enginegate.workspace import now
from flows.promote import promote
from flows.watch import watch
from tests.fakes.evidence import decision

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("flows")]


def test_old_samples_are_deleted_and_young_ones_stay(live, tmp_path, monkeypatch):
    """The policy's age counts, whoever recorded them."""
    monkeypatch.setenv("ENGINEGATE_HOME", str(tmp_path / "workspace"))
    source = tmp_path / "sample.npz"
    np.savez(source, **{"input.x": np.zeros((3, 16), np.float32)})
    home = tmp_path / "workspace" / "shadow"
    sample, _ = import_sample(source, "tiny", Shadow(), home=home)

    assert watch(live) == ()
    assert sample.is_dir()
    later = now() + timedelta(days=40)
    monkeypatch.setattr("tasks.watch.now", lambda: later)
    done = watch(live)

    assert any(sample.name in sentence for sentence in done)
    assert not sample.exists()


def test_a_changed_release_fails_the_watch(live, card, family):
    """One byte is enough, and the run says which file."""
    family.workspace.save_decision(decision(card, decided_at=now()))
    promote(live, card.digest)
    shutil.rmtree(family.workspace.root / "decisions")
    assert watch(live) == ()
    engine = live.parent / "live" / "tiny" / "1" / "model.onnx"
    engine.chmod(0o644)
    engine.write_bytes(engine.read_bytes() + b"x")

    with pytest.raises(RepositoryError, match=r"1/model\.onnx"):
        watch(live)
