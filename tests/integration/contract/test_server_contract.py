"""What promotions rely on, tried out on the Triton of this machine."""

import time

import pytest

from enginegate.contract.probe_model import ProbeModel
from enginegate.contract.server_contract import check_contract
from enginegate.evidence import Outcome
from enginegate.triton.server import ServerOptions, start

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("contract")]

# A stub that only completes configurations would cost a second for each load.
QUICK = "--disable-auto-complete-config"
LOST = "no request is lost while versions are switched"


@pytest.fixture(scope="module")
def quick(install, tmp_path_factory):
    folder = tmp_path_factory.mktemp("contract")
    (folder / "repository").mkdir()
    options = ServerOptions(flags=(QUICK, "--strict-readiness=true"))
    with start(install, folder / "repository", folder=folder, options=options) as running:
        yield running


def outcomes(checks):
    return {check.promise: (check.outcome, check.reason) for check in checks}


@pytest.mark.parametrize("folder", [False, True], ids=["files-in-the-call", "files-in-a-folder"])
def test_this_triton_keeps_every_promise(quick, folder):
    """And nothing of the trial is left on it."""
    repository = quick.repository if folder else None
    found = check_contract(quick.grpc, repository=repository, switches=1 + folder, rate_per_s=100.0)

    assert {check.outcome for check in found} == {Outcome.PASSED}, found
    assert len(found) == 8
    assert list(quick.repository.iterdir()) == []
    with quick.client() as client:
        assert [row for row in client.index() if row.ready] == []


def test_advice_to_unload_first_loses_requests(quick, monkeypatch):
    """What Triton's documentation has said since January 2026 fails the check."""
    serve = ProbeModel.serve

    def unload_first(self, *versions, **more):
        self.client.unload(self.name)
        while self.client.model_ready(self.name):
            time.sleep(0.01)
        return serve(self, *versions, **more)

    monkeypatch.setattr(ProbeModel, "serve", unload_first)

    found = outcomes(check_contract(quick.grpc, switches=1, rate_per_s=100.0))

    outcome, reason = found[LOST]
    assert outcome is Outcome.FAILED
    assert "UNAVAILABLE" in reason or "NOT_FOUND" in reason


def test_server_that_takes_no_load_calls_is_told_so(install, tmp_path):
    """It cannot be tried: that is no pass, and the message says what to change."""
    (tmp_path / "repository").mkdir()
    options = ServerOptions(flags=("--model-control-mode=none",))
    with start(install, tmp_path / "repository", folder=tmp_path, options=options) as none:
        (only,) = check_contract(none.grpc)

    assert only.outcome is Outcome.INCONCLUSIVE
    assert "--model-control-mode=explicit" in only.reason
