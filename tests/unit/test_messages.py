"""Numbers and counts in messages."""

import pytest

from enginegate.candidate import TensorSpec
from enginegate.messages import counted, per_second, short_number


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (180.4, "180"),
        (0.004213, "0.0042"),
        (7.0, "7"),
        (0.0, "0"),
        (99.96, "100"),
        (12345.6, "12,346"),
    ],
)
def test_number_has_no_exponent(value, said):
    """Two digits that count here, and never fewer than it has before the point."""
    assert short_number(value, 2) == said


def test_tiny_or_non_finite_number_stays_readable():
    """Neither is rounded to 0."""
    assert (short_number(float("inf")), short_number(float("nan"))) == ("inf", "nan")
    assert short_number(1.234e-9) == "1.23e-09"
    assert short_number(-53.7965) == "-53.8"


def test_rate_has_four_digits():
    """As many as the search tells apart."""
    assert [per_second(rate) for rate in (53.7965, 400.0, 12345.0)] == [
        "53.8/s",
        "400/s",
        "12,345/s",
    ]


def test_counted_noun_agrees_in_number():
    """Also where the plural is another word."""
    assert counted(1, "configuration") == "1 configuration"
    assert counted(12000, "configuration") == "12,000 configurations"
    assert counted(2, "node overflows", "nodes overflow") == "2 nodes overflow"


def test_free_axis_is_named():
    """The first one is the batch."""
    spec = TensorSpec(name="x", dtype="float32", shape=(-1, 1, -1, 8))

    assert str(spec) == "x: float32[batch, 1, any, 8]"
