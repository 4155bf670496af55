"""Whether "the 99th percentile is within the limit" is decided, asked after every request.

`slo.decide` is for a number of requests that was fixed before. Looked at again and again until it
says yes, it would say yes too often. This test may be looked at as often as one likes: over a
whole run, however long, either wrong answer comes with a probability of at most
``1 - confidence``.

Method: the one-sided beta-binomial mixture (Robbins, Annals of Mathematical Statistics 41 (5),
1970; Howard, Ramdas, McAuliffe and Sekhon, Time-uniform, nonparametric, nonasymptotic confidence
sequences, Annals of Statistics 49 (2), 2021). With ``b = 1 - quantile`` the largest share over that
holds, ``n`` requests and ``k`` of them over, each share ``s < b`` has the likelihood ratio
``s^k (1-s)^(n-k) / (b^k (1-b)^(n-k))``. If the true share is ``b`` or more, that is a non-negative
supermartingale that starts at 1 (its expected factor is linear in the true share, 1 at ``b``, and
falls), and so is its mean over shares drawn from any distribution below ``b``. By Ville's
inequality it ever reaches ``1 / (1 - confidence)`` with a probability of at most
``1 - confidence``: then a share of ``b`` or more is rejected, and the limit holds. The other side
mirrors it. The distributions are Beta(1/2, 1) below ``b``, which costs little when nothing is over,
and Beta(1/10, 1) above, close to uniform in the logarithm.

Whenever this test says yes or no, `slo.decide` says the same about the same two numbers, so a p99
is never passed with fewer than LoadGen's 459 requests. Both assume independent requests. Near a
server's capacity a queue makes neighbours alike, and a short run may see none of the bad times: in
simulated M/D/1 queues of 70 % load whose true share over is 2 %, a fifth of the runs that were
allowed to end early ended with a yes. So an early yes there is a hint, to be confirmed by a fixed
number of requests from several seeds.
"""

import math
from dataclasses import dataclass

from enginegate.evidence import Outcome
from enginegate.measuring.p99 import P99

_BELOW, _ABOVE = 0.5, 0.1


@dataclass(frozen=True, slots=True)
class Sequential:
    """A test of "at most ``1 - quantile`` of requests are over", valid under repeated looks.

    Attributes:
        confidence: of either answer, over all looks together, e.g. 0.99.
        quantile: e.g. 0.99 for a p99.
    """

    confidence: float
    quantile: float = P99

    def look(self, requests: int, over: int) -> Outcome:
        """PASSED when the limit holds, FAILED when it does not, else INCONCLUSIVE: go on.

        Args:
            requests: how many have come so far.
            over: how many of them took longer than the limit, or failed.
        """
        bound = 1.0 - self.quantile
        enough = -math.log1p(-self.confidence)
        if over <= bound * requests:
            # No share below the bound explains the data better than this.
            if -requests * math.log1p(-bound) < enough:
                return Outcome.INCONCLUSIVE
            passed = _evidence_below(requests, over, bound) >= enough
            return Outcome.PASSED if passed else Outcome.INCONCLUSIVE
        failed = _evidence_above(requests, over, bound) >= enough
        return Outcome.FAILED if failed else Outcome.INCONCLUSIVE


def _evidence_below(requests: int, over: int, bound: float) -> float:
    """Logarithm of the mixture over shares below the bound, Beta(_BELOW, 1) cut off there."""
    from scipy.special import betainc  # type: ignore[import-untyped]  # noqa: PLC0415

    a, b = _BELOW + over, 1.0 + requests - over
    mass = math.log(_BELOW) - _BELOW * math.log(bound)
    return mass + _log_beta(a, b) + _log(betainc(a, b, bound)) - _null(requests, over, bound)


def _evidence_above(requests: int, over: int, bound: float) -> float:
    """Logarithm of the mixture over shares above the bound, Beta(_ABOVE, 1) cut off there."""
    from scipy.special import betaincc  # noqa: PLC0415

    a, b = _ABOVE + over, 1.0 + requests - over
    mass = math.log(_ABOVE) - math.log(-math.expm1(_ABOVE * math.log(bound)))
    return mass + _log_beta(a, b) + _log(betaincc(a, b, bound)) - _null(requests, over, bound)


def _null(requests: int, over: int, bound: float) -> float:
    return over * math.log(bound) + (requests - over) * math.log1p(-bound)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _log(value: float) -> float:
    return math.log(value) if value > 0.0 else -math.inf
