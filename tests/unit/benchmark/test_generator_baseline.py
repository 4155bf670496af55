"""What the generator costs is found out once, and is no reason not to measure."""

import numpy as np
import pytest

from enginegate.benchmark import generator_baseline
from enginegate.benchmark.generator_baseline import GeneratorBaseline, _highest, best_driver
from enginegate.errors import ServerError
from enginegate.loadgen.traffic import LoadResult, Transport
from enginegate.measurement import Generator, Load


class Answering:
    """Calibrates to the given rates, one each time; an error is raised."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def __call__(self, _server, **_how):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return Generator(null_p50_ms=0.5, trusted_per_s=answer)


@pytest.fixture
def calibrated(tmp_path, monkeypatch):
    """What comes of these answers, and what was said."""

    def run(*answers):
        said = []
        answering = Answering(*answers)
        monkeypatch.setattr(generator_baseline, "calibrate", answering)
        found = GeneratorBaseline(Transport(), 1000.0, ("here",), tmp_path, said.append)
        return found.measure(None), found, said, answering.answers

    return run


@pytest.mark.parametrize(
    ("answers", "trusted_per_s", "unasked"),
    [
        pytest.param((1000.0, 9.0), 1000.0, [9.0], id="every-rate-at-once"),
        pytest.param((600.0, 1000.0), 1000.0, [], id="a-bad-moment"),
        pytest.param((600.0, 360.0), 600.0, [], id="twice-less"),
    ],
)
def test_baseline_short_of_the_rate_is_measured_again(calibrated, answers, trusted_per_s, unasked):
    """Once; the better of the two is what was shown."""
    found, _, _, left = calibrated(*answers)

    assert (found.trusted_per_s, left) == (trusted_per_s, unasked)


def test_incomplete_baseline_is_believed_for_a_while(calibrated):
    """So that of many candidates that are measured in a row only the first pays for it."""
    calibrated(600.0, 600.0)

    found, _, _, left = calibrated(1000.0)

    assert (found.trusted_per_s, left) == (600.0, [1000.0])


def test_only_complete_baselines_are_kept(calibrated, monkeypatch):
    """The other may have met a bad moment, so a benchmark some time later tries again."""
    monkeypatch.setattr(generator_baseline, "_RECENT_S", 0.0)
    calibrated(600.0, 600.0)
    calibrated(1000.0)

    found, _, _, left = calibrated(9.0)

    assert (found.trusted_per_s, left) == (1000.0, [9.0])


def test_incomplete_baseline_sets_no_rate_limit(calibrated):
    """Measurements carry what a do-nothing model takes, and no rate that they must not pass."""
    found, how, _, _ = calibrated(600.0, 600.0)

    assert how.for_measurements(found) == Generator(null_p50_ms=0.5)
    assert (
        how.for_measurements(found.model_copy(update={"trusted_per_s": 1000.0})).trusted_per_s
        == 1000.0
    )


def test_no_baseline_without_the_python_backend(calibrated):
    """The do-nothing model needs it; the engine that is measured may not."""
    found, _, said, _ = calibrated(ServerError("unable to find backend library"))

    assert found == Generator()
    assert said == ["the generator was not calibrated: unable to find backend library"]


def _generator(capacity_per_s, *, answered=True):
    """A generator that sends up to a rate, and falls behind above it."""

    def send(rate_per_s, duration_s):
        due_s = np.arange(0.0, duration_s, 1 / rate_per_s)
        return LoadResult(
            load=Load(rate_per_s=rate_per_s, duration_s=duration_s, seed=0),
            due_s=due_s,
            sent_s=due_s * max(1.0, rate_per_s / capacity_per_s),
            latency_s=np.full(len(due_s), 0.001 if answered else np.inf),
            samples=np.zeros(len(due_s), np.int64),
            versions=np.full(len(due_s), "1"),
            errors={},
            cpu_share=0.5,
            lasted_s=duration_s,
        )

    return send


@pytest.mark.parametrize(
    ("capacity_per_s", "trusted_per_s"),
    [
        pytest.param(5000.0, 4000.0, id="all-that-was-asked"),
        pytest.param(3000.0, 2400.0, id="less"),
        pytest.param(20.0, 0.0, id="nothing"),
    ],
)
def test_highest_rate_kept_up_with(capacity_per_s, trusted_per_s):
    """A rate that is not kept up with is lowered until one is; none at all is 0."""
    found = _highest(_generator(capacity_per_s), 4000.0, budget_s=60.0)

    assert found.trusted_per_s == pytest.approx(trusted_per_s)
    assert (found.null_p50_ms, found.null_p99_ms) == (pytest.approx(1.0), pytest.approx(1.0))


def test_failures_are_no_calibration():
    """A model that fails says nothing about the generator."""
    found = _highest(_generator(5000.0, answered=False), 4000.0, budget_s=60.0)

    assert (found.trusted_per_s, found.null_p50_ms) == (0.0, None)


def test_calibration_ends_with_its_budget():
    """Without time for another try the first one is the answer."""
    assert _highest(_generator(3000.0), 4000.0, budget_s=0.0).trusted_per_s == 0.0


@pytest.mark.parametrize(
    ("ours", "theirs", "driver", "asked"),
    [
        pytest.param(1000.0, 9000.0, "python", False, id="ours-reaches-every-rate"),
        pytest.param(600.0, 1000.0, "perf_analyzer", True, id="theirs-reaches-more"),
        pytest.param(600.0, 600.0, "python", True, id="neither-more"),
        pytest.param(600.0, None, "python", True, id="theirs-fails"),
        pytest.param(None, 200.0, "perf_analyzer", True, id="ours-fails"),
    ],
)
def test_who_sends(ours, theirs, driver, asked):
    """The other is measured only where ours falls short, and sends only if it was shown more."""
    measured = []

    def other():
        measured.append(True)
        return Generator(driver="perf_analyzer", trusted_per_s=theirs)

    found = best_driver(Generator(trusted_per_s=ours), 1000.0, other)

    assert (found.driver, bool(measured)) == (driver, asked)
