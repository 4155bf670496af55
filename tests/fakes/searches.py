"""Searches on a simulated server, and what is read from their results."""

import numpy as np

from enginegate.search.search import search
from tests.fakes.simulated_triton import LOAD_S


def search_on(server, bounds, slo, **options):
    return search(server.measure, bounds, slo, clock=server.clock, **options)


def finding_of(result, gate):
    return next(finding for finding in result.findings if finding.gate == gate)


def only_where(server, holds, make_sampled):
    """Answers nothing, but for the configurations that hold."""

    def measure(config, load, *, ends=None):
        if holds(config):
            return server.measure(config, load, ends=ends)
        server.now_s += 0.5 + LOAD_S
        return make_sampled(config, load, np.full(400, np.inf), lasted_s=0.5)

    return measure
