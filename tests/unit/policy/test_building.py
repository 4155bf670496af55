"""Tables of a policy that decide how engines are built."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from enginegate.errors import PolicyError
from enginegate.policy import parse_policy, read_policy
from enginegate.policy.building import DimensionRange, Shapes

DIGITS = Path(__file__).parents[3] / "policies" / "digits.toml"


@pytest.mark.parametrize("sizes", [(2, 1, 3), (1, 4, 3), (0, 1, 1)])
def test_ranges_ascend(sizes):
    """A range whose sizes do not ascend from one is refused."""
    with pytest.raises(ValidationError):
        DimensionRange(min=sizes[0], best=sizes[1], max=sizes[2])


def test_single_axes_go_before_the_sequence():
    """The range of one axis counts for it alone."""
    sequence, height = (
        DimensionRange(min=1, best=8, max=16),
        DimensionRange(min=32, best=64, max=64),
    )
    shapes = Shapes(sequence=sequence, axes={"image.2": height})

    assert shapes.of("image", 2) == height
    assert shapes.of("image", 3) == sequence
    assert Shapes().of("image", 2) is None


def test_everything_has_a_default():
    """A policy without these tables builds as before."""
    rules = read_policy(DIGITS).model_dump()
    for table in ("shapes", "onnxruntime", "tensorrt"):
        rules.pop(table)
    policy = parse_policy(rules, "policy")

    assert policy.engine_tables.kinds["onnxruntime"].device == "auto"
    assert policy.engine_tables.kinds["tensorrt"].library == "auto"
    assert policy.shapes.batch is None


def with_made(*made):
    raw = read_policy(DIGITS).model_dump()
    raw["candidates"] = {"onnxruntime": ["fp32"], "made": list(made)}
    return parse_policy(raw, "test policy")


QAT = {"file": "qat.onnx", "precision": "int8", "name": "qat"}


def test_candidates_made_elsewhere_come_last_with_names_of_their_own():
    """Each is judged as an engine kind at a precision, like those that are built here."""
    package = {"file": "fast.pt2", "precision": "fp16"}
    archive = {"file": "tuned.ait", "precision": "fp32", "kind": "onnxruntime", "name": "tuned"}

    candidates = with_made(QAT, package, archive).candidates

    assert [str(candidate) for candidate in candidates.all()] == [
        "onnxruntime-fp32",
        "onnxruntime-int8+qat",
        "torch_inductor-fp16+made",
        "onnxruntime-fp32+tuned",
    ]
    assert [each.is_code for each in candidates.made] == [False, True, False]
    assert candidates.made_as(candidates.all()[0]) is None


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ([{**QAT, "file": "qat.pth"}], "file ends in .pth, and can end in .onnx, .pt2, .ait"),
        ([{**QAT, "kind": "torch_inductor"}], "torch_inductor takes .pt2"),
        ([{**QAT, "kind": "nothing"}], "there is no engine kind 'nothing' here"),
        ([{**QAT, "name": "keep2"}], "keep is how repaired candidates are named"),
        ([QAT, {**QAT, "file": "other.onnx"}], "two are called onnxruntime-int8\\+qat"),
        ([{**QAT, "file": "../qat.onnx"}], "may not contain '..'"),
        ([{"file": "tuned.ait", "precision": "fp32"}], "kind says which engine an .ait holds"),
    ],
)
def test_unclear_candidates_made_elsewhere_are_refused(made, said):
    with pytest.raises(PolicyError, match=said):
        with_made(*made)
