"""The serving half of a qualification, alone."""

import pytest

from enginegate.evidence import Outcome
from enginegate.measurement import Measurement
from enginegate.policy import read_policy
from enginegate.triton.config import read_config
from flows.benchmark import benchmark_candidates
from flows.promote import promote
from tests.fakes.authentic import decide
from tests.fakes.evidence import FP32, INT8

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("flows")]


def measured(family):
    """Each valid measurement's file as it was written; invalid ones are not kept.

    One that is made again is another inode; one that is used again has another time.
    """
    folder = family.workspace.results / "measurements"
    return {path: path.stat().st_ino for path in folder.iterdir()}


def check_reused(before, after, benchmarks):
    """No valid measurement was made again, and anything new began with one that was invalid.

    An invalid one is not kept, so it is measured again; where it is valid now, the search may go on
    elsewhere from it.
    """
    assert {path: after[path] for path in before} == before
    made = [Measurement.read(path) for path in after.keys() - before.keys()]
    invalid = {(m.config, m.load) for found in benchmarks for m in found.measurements if m.invalid}
    assert not made or any((m.config, m.load) in invalid for m in made)


def test_benchmark_reuses_what_qualify_measured(qualified, family):
    """The same candidates: the same benchmarks, from the store, and the winner's configuration."""
    rules = read_policy(family.policy)
    before = measured(family)

    found = benchmark_candidates(rules, rules.candidates.all())

    report = found.report
    check_reused(before, measured(family), qualified.benchmarks)
    decided = [b for b in qualified.benchmarks if b.outcome in {Outcome.PASSED, Outcome.FAILED}]
    assert decided
    assert [b for b in report.candidates if b in decided] == decided
    assert report.winner is not None
    assert "Accuracy was not judged" in report.reason
    assert list(map(str, found.unmeasured)) == ["tensorrt-fp16"]
    config = read_config(found.config_pbtxt, "test")
    assert config.serving == report.best.chosen
    assert "# 4 is the only value" in found.config_pbtxt


def test_changed_slo_is_decided_from_cached_measurements(qualified, family, tmp_path):
    """Another limit on the same latencies: another verdict, and not one request sent."""
    policy = family.edited(tmp_path / "moved.toml", ("p99_ms = 250", "p99_ms = 240"))
    rules = read_policy(policy)
    before = measured(family)

    found = benchmark_candidates(rules, (qualified.winner,))

    (benchmark,) = found.report.candidates
    assert benchmark.outcome is Outcome.PASSED
    assert next(f.limit for f in benchmark.findings if f.gate == "p99_ms") == 240
    check_reused(before, measured(family), qualified.benchmarks)


def test_the_live_release_is_measured_in_turns(live, card, family, tmp_path):
    """Its own bytes, beside each candidate but the one it is; and the gate compares with it."""
    decide(card, read_policy(live), family.workspace)
    release = promote(live, card.digest)
    policy = tmp_path / "champion.toml"
    against = 'confidence = 0.9\nfaster_than = "champion"\nmin_speedup = 0.5\nconfirmations'
    policy.write_text(live.read_text().replace("confidence = 0.9\nconfirmations", against))
    rules = read_policy(policy)

    found = benchmark_candidates(rules, (FP32, INT8))

    for benchmark in found.report.candidates:
        gates = [finding.gate for finding in benchmark.findings]
        if benchmark.candidate == release.engine.candidate:
            assert benchmark.rival is None
            assert "speedup" not in gates
        else:
            assert benchmark.rival.release == release.version
            assert len(benchmark.rival.champion_p99_ms) == len(benchmark.rival.candidate_p99_ms)
            assert "speedup" in gates
