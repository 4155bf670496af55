"""What hosts of a model say of themselves."""

import time

import numpy as np

from enginegate.repository import Layout, LiveRepository, ObjectRepository, verify
from enginegate.repository.history.journal import Step
from enginegate.repository.store.object_journal import is_analysing_canary

_ANALYSIS_S = 60.0


def answer(host: ObjectRepository) -> tuple[int, float]:
    """Which version answers on a host, and what it adds."""
    assert host.client is not None
    reply = host.client.infer("digits", {"x": np.zeros((1, 2), np.float32)})
    return int(reply.model_version), float(reply.outputs["y"][0, 0])


def problems(host: LiveRepository | ObjectRepository) -> list[str]:
    """What is not as it was published, here or in storage."""
    return [check.problem for check in verify(host) if check.problem]


def live(host: ObjectRepository) -> int | None:
    """Which release a host's own repository says is live."""
    current = Layout(host.root, "digits").current()
    return current.version if current else None


def steps(host: ObjectRepository) -> list[Step]:
    """What the journal in storage says of the last operation."""
    entries = host.journal.read()
    return [entry.step for entry in entries if entry.operation == entries[-1].operation]


def wait_for_canary(host: ObjectRepository) -> None:
    """Return when the journal in storage says that a canary is watched."""
    deadline = time.monotonic() + _ANALYSIS_S
    while not ((last := host.journal.last()) is not None and is_analysing_canary(last)):
        assert time.monotonic() < deadline, "no canary is watched"
        time.sleep(0.05)
