"""What tests of the watch do with a policy and what it watches."""

import pytest

from enginegate.loadgen.background_load import BackgroundLoad
from enginegate.loadgen.traffic import Traffic
from enginegate.policy import read_policy
from enginegate.repository import (
    Layout,
)
from enginegate.shadow import latest_sample
from enginegate.triton.endpoint import live_addresses
from enginegate.watch.log import PromiseBrokenError
from flows.watch import watch
from tests.fakes.family import samples


def edited(path, target, *edits):
    """A copy of a policy with replacements."""
    text = path.read_text()
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new, 1)
    target.write_text(text)
    return target


def release_of(path):
    layout = Layout(read_policy(path).target.repository, "tiny")
    return layout.release(layout.current().version)


def visitors(path):
    """Users' requests, eighty a second without a gap, until the block ends."""
    address = live_addresses(read_policy(path).target).grpc
    traffic = Traffic.from_data("tiny", samples(50, 9))
    return BackgroundLoad(address, traffic, rate_per_s=80)


def gates(check):
    return {finding.gate: finding for finding in check.findings}


def broken(path, *run):
    """The checks of a run in which a promise was broken, and what it said."""
    with pytest.raises(PromiseBrokenError) as raised:
        watch(path, *run)
    return raised.value.watched.checks, str(raised.value)


def only_here(home):
    """The session's workspace is shared, so a test's samples are kept in a folder of its own."""

    def find(_, model):
        return latest_sample(home, model)

    return find
