"""Parts in a workspace: found by what decides them, and only while every file is sound."""

import pytest

from enginegate.devices import PartStore
from enginegate.errors import InputError
from enginegate.evidence import Outcome
from enginegate.workspace import Workspace
from tests.fakes.evidence import INT8, finding, sha, verdict
from tests.fakes.parts import part


@pytest.fixture
def workspace(tmp_path):
    return Workspace(tmp_path / "here")


def test_part_is_found_by_everything_that_decides_it(workspace):
    made = part(workspace)
    other = made.identity.model_copy(update={"policy_sha256": sha("9")})

    assert PartStore(workspace).find(made.identity) == made
    assert PartStore(workspace).find(other) is None
    assert made.identity.differences(other) == ("policy_sha256",)
    assert "ada@gpu-host made at 2026-11-20 12:00 differs in policy_sha256" in PartStore(
        workspace
    ).near(other)


@pytest.mark.parametrize("damaged", ["model.onnx", "manifest.json", "golden"])
def test_part_without_its_very_files_is_none(workspace, damaged):
    """An engine, its manifest or its golden answers: what was judged must be what is published."""
    made = part(workspace)
    (path,) = [p for p in PartStore(workspace).files(made) if damaged in str(p)]
    path.chmod(0o644)
    path.write_bytes(b"something else")

    assert PartStore(workspace).find(made.identity) is None


def test_part_about_another_engine_than_it_names_is_none(workspace):
    made = part(workspace)
    other = made.evidence.model_copy(update={"verdicts": (verdict(),)})
    PartStore(workspace).save(made.model_copy(update={"evidence": other}))

    assert PartStore(workspace).find(made.identity) is None


def test_part_in_which_something_broke_may_be_made_again(workspace):
    made = part(workspace)
    broke = verdict(finding(Outcome.ERRORED), candidate=INT8)
    other = made.evidence.model_copy(update={"verdicts": (broke,)})

    assert not made.errored
    assert made.model_copy(update={"evidence": other}).errored


def test_kind_without_evidence_is_named_with_those_that_have_some(workspace):
    part(workspace)

    with pytest.raises(InputError, match=r"no evidence from h100 \(.*: l4\)"):
        PartStore(workspace).newest("h100")
