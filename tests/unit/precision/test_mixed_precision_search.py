"""The search keeps few nodes, within its budget, whatever the gates say."""

import pytest

from enginegate.candidate import Candidate
from enginegate.evidence import Outcome
from enginegate.policy import Repair
from enginegate.precision import PrecisionTrial, Sensitivity, search_mixed_precision

NAMES = tuple("abcdefghijklmnop")


def trial(kept, *, passed):
    return PrecisionTrial(
        kept=kept,
        passed=passed,
        outcome=Outcome.PASSED if passed else Outcome.FAILED,
        reason="",
        divergence=1.0 / (1 + len(kept)),
        measure="kl_p99",
    )


class Attempts:
    """Passes when every needed node is kept; each attempt takes a second."""

    def __init__(self, *needed):
        self.needed, self.made, self.now = set(needed), [], 0.0

    def __call__(self, kept):
        self.made.append(kept)
        self.now += 1.0
        return trial(kept, passed=self.needed <= set(kept))


def searched(attempts, **limits):
    ranked = [Sensitivity(node=n, error=1.0 / (i + 1), samples=8) for i, n in enumerate(NAMES)]
    return search_mixed_precision(
        trial((), passed=False),
        ranked,
        attempts,
        candidate=Candidate.parse("onnxruntime-int8"),
        limits=Repair(**{"max_builds": 30, "max_kept_share": 1.0, **limits}),
        clock=lambda: attempts.now,
    )


@pytest.mark.parametrize(
    "needed",
    [
        pytest.param(("a",), id="worst"),
        pytest.param(("a", "b", "c"), id="prefix"),
        pytest.param(("e",), id="one-in-the-middle"),
        pytest.param(("b", "g"), id="two-apart"),
        pytest.param(NAMES, id="all"),
    ],
)
def test_finds_exactly_the_needed_nodes(needed):
    """Doubling, halving and giving back end at the smallest set, and no set is tried twice."""
    attempts = Attempts(*needed)

    found = searched(attempts)

    assert set(found.repaired.kept) == set(needed)
    assert len(attempts.made) == len(set(attempts.made))
    assert found.trials[0].kept == ()
    assert len(found.trials) == len(attempts.made) + 1


def test_builds_are_limited():
    """The smallest passing set so far counts, and the reason says why it ended."""
    found = searched(Attempts("e"), max_builds=5)

    assert len(found.trials) == 6
    assert found.repaired is not None
    assert "5 builds" in found.reason


def test_exhausted_build_budget_finds_nothing():
    """A search that ran out of builds says so, and repairs nothing."""
    found = searched(Attempts("p"), max_builds=2)

    assert found.repaired is None
    assert "no passing set was found before 2 builds" in found.reason


def test_time_is_limited():
    """No build starts after the budget; the clock is the caller's."""
    attempts = Attempts("p")

    found = searched(attempts, budget_s=2.5)

    assert len(attempts.made) == 3
    assert "2.5 s" in found.reason


def test_share_is_limited():
    """At most that share is kept: more would not be that precision."""
    attempts = Attempts(*NAMES)

    found = searched(attempts, max_kept_share=0.25)

    assert found.repaired is None
    assert max(map(len, attempts.made)) == 4
    assert "even with the 4 worst of 16" in found.reason


def test_no_node_may_be_kept():
    """A share that rounds to nothing is said, and nothing is built."""
    attempts = Attempts("a")

    found = searched(attempts, max_kept_share=0.01)

    assert attempts.made == []
    assert "max_kept_share" in found.reason


def test_outputs_that_were_not_finite_rank_first():
    """NaN is the worst cost."""
    assert Sensitivity(node="a", error=None, samples=1).cost == float("inf")
