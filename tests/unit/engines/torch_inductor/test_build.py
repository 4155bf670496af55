"""When a compiled package's answers count as eager's."""

import math

import pytest

from enginegate.engines.torch_inductor.foreign import share_apart

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("expected", "given", "share"),
    [
        pytest.param([1.0, -4.0], [1.0, -4.0], 0.0, id="equal"),
        pytest.param([1.0, -4.0], [1.0, -3.0], 0.25, id="apart"),
        pytest.param([1.0, INF, NAN], [1.0, INF, NAN], 0.0, id="both-overflow"),
        pytest.param([2.0, INF], [1.0, INF], 0.5, id="apart-beside-an-overflow"),
        pytest.param([1.0, INF], [1.0, -INF], INF, id="other-infinity"),
        pytest.param([0.0, 0.0], [0.0, 0.0], 0.0, id="zeros"),
    ],
)
def test_difference_is_a_share_of_the_largest_answer(expected, given, share):
    """What overflows in both is no difference."""
    import torch

    found = share_apart(torch.tensor(expected).double(), torch.tensor(given).double())

    assert found == pytest.approx(share)


@pytest.mark.parametrize(("expected", "given"), [([1.0, 2.0], [1.0, NAN]), ([NAN], [1.0])])
def test_answer_that_is_no_number_is_within_no_limit(expected, given):
    """Wherever the package has it and eager has not, or the other way round."""
    import torch

    found = share_apart(torch.tensor(expected).double(), torch.tensor(given).double())

    assert not found <= 1e9
