"""What a promotion takes from the workspace for each kind of device."""

from types import SimpleNamespace

import numpy as np
import pytest

from enginegate.devices import PartStore, read_bundle, write_bundle
from enginegate.repository.store.golden import Golden
from enginegate.workspace import Workspace
from tasks.release import _judged_engine, _recorded_golden
from tests.fakes.parts import part

KINDS = {"a10": 1.0, "l4": 2.0}


@pytest.fixture
def publication(tmp_path):
    """Two kinds of device, each brought from its machine: equal engine bytes, other answers."""
    workspace = Workspace(tmp_path / "here")
    for name, answer in KINDS.items():
        there = Workspace(tmp_path / name)
        golden = tmp_path / f"{name}.npz"
        x = np.zeros((1, 4), np.float32)
        Golden({"x": x}, {"y": x + np.float32(answer)}).write(golden)
        made = part(there, name, build_s=answer, answers=golden.read_bytes())
        write_bundle(made, there, tmp_path / f"{name}.evidence")
        read_bundle(tmp_path / f"{name}.evidence", workspace)
    return SimpleNamespace(workspace=workspace, evidence=None)


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_is_released_with_what_it_was_judged_by(publication, tmp_path, name):
    """Its own manifest, which says what the engine was built for, and its own golden answers."""
    (made,) = PartStore(Workspace(tmp_path / name)).parts()
    (verdict,) = made.evidence.verdicts

    engine, folder = _judged_engine(publication, made.shown(), verdict)
    golden = _recorded_golden(publication, made.shown(), engine)

    assert engine.build_s == KINDS[name]
    assert folder.is_relative_to(publication.workspace.root)
    assert (golden.outputs["y"] == KINDS[name]).all()
