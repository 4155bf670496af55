"""Tables of a policy that decide how engines are built."""

from pathlib import Path

import pytest
from pydantic import ValidationError

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
