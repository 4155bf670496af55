"""Pictures are drawn of any benchmark there can be."""

import pytest

from enginegate.charts import delay_chart, latency_chart, pareto_chart, stage_chart
from enginegate.evidence import Point
from tests.fakes.evidence import FP32, INT8, benchmark
from tests.fakes.qualification import plan, qualification

CARD = qualification()


def pictures(*benchmarks):
    return (
        latency_chart("digits", benchmarks, 25.0),
        delay_chart("digits", benchmarks, 25.0),
        stage_chart("digits", benchmarks),
        pareto_chart("digits", benchmarks, 25.0, {}),
    )


@pytest.mark.parametrize(
    "drawn",
    [
        pytest.param(CARD.benchmarks, id="several-candidates"),
        pytest.param((CARD.benchmark(INT8),), id="chosen-and-invalid"),
        pytest.param((CARD.benchmark(plan("bf16")),), id="none-chosen"),
        pytest.param((benchmark(),), id="nothing-measured"),
        pytest.param((), id="no-candidate"),
    ],
)
def test_every_benchmark_can_be_drawn(drawn):
    """SVG comes out, whatever was found."""
    for picture in pictures(*drawn):
        assert picture.startswith(b"<?xml")
        assert b"<svg" in picture
        assert picture.count(b"<g") == picture.count(b"</g>")


def test_equal_evidence_gives_equal_bytes():
    """No date, version or random id gets into the file."""
    assert pictures(*CARD.benchmarks) == pictures(*CARD.benchmarks)
    assert pictures(*CARD.benchmarks) != pictures(CARD.benchmark(FP32))


def test_unpriced_point_is_drawn_beside_a_priced_one():
    """Its cost is not known, so it stands at zero."""
    p99 = CARD.benchmark(INT8).p99_at_slo
    points = tuple(
        Point(
            config=CARD.benchmark(INT8).measurements[0].config,
            rate_per_s=100,
            p99=p99,
            cost_per_million=cost,
        )
        for cost in (0.25, None)
    )
    found = CARD.benchmark(INT8).model_copy(update={"pareto": points})

    assert b"<svg" in pareto_chart("digits", (found,), 25.0, {})


def test_words_are_not_read_as_mathematics():
    """A model's name may hold dollars, which stay as they are."""
    assert b"$a$ &lt;b&gt;" in stage_chart("$a$ <b>", ())
