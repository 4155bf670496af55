"""What the generator costs is found out once, and is no reason not to measure."""

import pytest

from enginegate.benchmark import generator_baseline
from enginegate.benchmark.generator_baseline import GeneratorBaseline
from enginegate.errors import ServerError
from enginegate.loadgen.traffic import Transport
from enginegate.measurement import Generator


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
        return found.of(None), found, said, answering.answers

    return run


@pytest.mark.parametrize(
    ("answers", "trusted_per_s", "unasked"),
    [
        pytest.param((1000.0, 9.0), 1000.0, [9.0], id="every-rate-at-once"),
        pytest.param((600.0, 1000.0), 1000.0, [], id="a-bad-moment"),
        pytest.param((600.0, 360.0), 600.0, [], id="twice-less"),
    ],
)
def test_one_that_fell_short_is_made_again(calibrated, answers, trusted_per_s, unasked):
    """Once; the better of the two is what was shown."""
    found, _, _, left = calibrated(*answers)

    assert (found.trusted_per_s, left) == (trusted_per_s, unasked)


def test_only_one_that_made_every_rate_is_kept(calibrated):
    """The other may have met a bad moment, so the next benchmark tries again."""
    calibrated(600.0, 600.0)
    calibrated(1000.0)

    found, _, _, left = calibrated(9.0)

    assert (found.trusted_per_s, left) == (1000.0, [9.0])


def test_what_fell_short_voids_no_measurement(calibrated):
    """Measurements carry what a do-nothing model takes, and no rate that they must not pass."""
    found, how, _, _ = calibrated(600.0, 600.0)

    assert how.stated(found) == Generator(null_p50_ms=0.5)
    assert how.stated(found.model_copy(update={"trusted_per_s": 1000.0})).trusted_per_s == 1000.0


def test_without_the_python_backend_there_is_none(calibrated):
    """The do-nothing model needs it; the engine that is measured may not."""
    found, _, said, _ = calibrated(ServerError("unable to find backend library"))

    assert found == Generator()
    assert said == ["the generator was not calibrated: unable to find backend library"]
