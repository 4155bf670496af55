"""The scheduled flow that qualifies new versions of the registry, on a real MLflow and Prefect."""

import os
import socket
import subprocess
import sys
import uuid
from datetime import timedelta

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName

from enginegate.errors import EnginegateError, InputError, TrackingError
from enginegate.policy import read_policy
from enginegate.tracking import Tracker
from enginegate.workspace import Workspace, now
from flows.qualify import qualify
from flows.scan import scan
from tasks.scan import Claim, new_versions, start_elsewhere

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("flows")]


@pytest.fixture
def scanned(family, tmp_path):
    """Make a policy, new by its digest, that scans for an alias; version 1 carries it."""
    tracker = Tracker(family.workspace.tracking_uri, family.workspace.artifacts)

    def make(*edits, scan='alias = "candidate"'):
        path = family.edited(tmp_path / "policy.toml", *edits)
        text = f"{path.read_text()}\n[watch]\nlook_s = {uuid.uuid4().int % 86_400 + 1}\n"
        path.write_text(f"{text}\n[scan]\n{scan}\n")
        return path

    tracker.move_alias("tiny", "candidate", 1)
    return make


@pytest.fixture
def deployment(prefect_server):
    """A deployment of `qualify` that no worker serves, and the runs that were asked of it."""
    del prefect_server  # it only has to run
    name = f"test-{uuid.uuid4().hex[:6]}"
    with get_client(sync_client=True) as client:
        client.create_deployment(
            flow_id=client.create_flow(qualify), name=name, entrypoint="flows.qualify.qualify"
        )

        def runs():
            wanted = DeploymentFilter(name=DeploymentFilterName(any_=[name]))
            return client.read_flow_runs(deployment_filter=wanted)

        yield f"qualify/{name}", runs


def test_new_version_starts_one_deployment_run(scanned, deployment):
    """The alias starts one run with that version; the next scan finds nothing new."""
    policy, (name, runs) = scanned(), deployment

    assert scan(policy, name) == ("models:/tiny/1",)
    assert scan(policy, name) == ()

    (run,) = runs()
    assert run.parameters == {"policy": str(policy), "model_uri": "models:/tiny/1"}


def test_versions_are_found_by_tag_with_and_without_a_value(scanned, deployment, family):
    """A tag's name alone, or with its value; another value is not meant."""
    tracker = Tracker(family.workspace.tracking_uri, family.workspace.artifacts)
    tracker.tag_version("tiny", 1, {"stage": "ready"})
    name, _ = deployment

    assert scan(scanned(scan='tag = "stage=other"'), name) == ()
    assert scan(scanned(scan='tag = "stage"'), name) == ("models:/tiny/1",)
    assert tracker.versions_with("tiny", tag="stage=ready", alias="candidate") == (1,)
    assert tracker.versions_with("nobody", tag="stage", alias="candidate") == ()


def test_every_page_of_the_registry_is_read(family, monkeypatch):
    """MLflow answers so many versions at once, and says that there are more."""
    tracker = Tracker(family.workspace.tracking_uri, family.workspace.artifacts)
    tracker.client.create_registered_model("many")
    for _ in range(3):
        tracker.client.create_model_version("many", "file:///nowhere", tags={"ready": "yes"})
    monkeypatch.setattr("enginegate.tracking.tracker._PAGE", 2)

    assert tracker.versions_with("many", tag="ready=yes") == (1, 2, 3)


def test_without_a_deployment_it_is_qualified_here(scanned, family, qualified):
    """The same flow as by hand, so it ends in a scorecard of this policy."""
    del qualified  # what it found out is found again
    policy = scanned()

    assert scan(policy) == ("models:/tiny/1",)

    digest = read_policy(policy).digest
    assert any(card.policy_sha256 == digest for card in family.workspace.scorecards())


def test_failing_start_is_tried_three_times(scanned):
    """Each scan tries once and says why; then the version is left alone."""
    policy = scanned()

    for _ in range(3):
        with pytest.raises(EnginegateError, match=r"models:/tiny/1.*qualify/nowhere"):
            scan(policy, "qualify/nowhere")
    assert scan(policy, "qualify/nowhere") == ()


def found(policy):
    return new_versions.fn(
        policy.scan,
        policy.model,
        lambda uri: policy.with_model(uri).digest,
        Workspace.of(policy),
    )


def test_two_scans_do_not_start_one_version_twice(scanned):
    """What another process claimed is its; what a dead process claimed is free again."""
    rules = read_policy(scanned())
    (start,) = found(rules)

    assert found(rules) == ()
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    dead = Claim(host=socket.gethostname(), pid=gone.pid, at=now())
    start.claim.write_bytes(dead.pretty_json())
    (again,) = found(rules)
    assert (again.uri, again.claim.name) == (start.uri, "2.json")


def test_unconfirmed_start_is_not_repeated(scanned, deployment):
    """Its run was asked for under the first claim's name, and so is the second attempt's."""
    policy, (name, runs) = scanned(), deployment
    rules = read_policy(policy)
    (start,) = found(rules)
    old = Claim(host="gone", pid=1, at=now() - timedelta(hours=25))
    start.claim.write_bytes(old.pretty_json())
    start_elsewhere.fn(policy, start, name)

    (again,) = found(rules)
    start_elsewhere.fn(policy, again, name)

    assert again.claim.name == "2.json"
    assert len(runs()) == 1


def test_claim_expires_after_a_day():
    """A process of ours may have another's number after a restart."""
    ours = {"host": socket.gethostname(), "pid": os.getpid()}

    assert not Claim(**ours, at=now() - timedelta(hours=23)).abandoned()
    assert Claim(**ours, at=now() - timedelta(hours=25)).abandoned()


def test_policy_without_scan_mark_is_refused(family):
    """There is nothing it could mean."""
    with pytest.raises(InputError, match=r"\[scan\]"):
        scan(family.policy)


def test_without_mlflow_nothing_is_claimed(scanned, monkeypatch, deployment):
    """The scan fails and says so; the next one finds everything new."""
    policy = scanned()
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", "sqlite:////proc/nowhere/mlflow.db")
        with pytest.raises(TrackingError):
            scan(policy, deployment[0])

    assert scan(policy, deployment[0]) == ("models:/tiny/1",)
