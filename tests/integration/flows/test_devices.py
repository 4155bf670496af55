"""Kinds of device: each part made where such a device is, gathered on one scorecard."""

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectNotFound

from enginegate.approval_rules import objection
from enginegate.devices import PartStore
from enginegate.errors import EnginegateError, PolicyError
from enginegate.evidence import contradictions
from enginegate.policy import read_policy
from enginegate.report import scorecard_markdown, scorecard_text
from enginegate.repository import Layout, open_target, verify
from enginegate.tracking import Tracker
from enginegate.triton.endpoint import live_server
from flows.promote import promote
from flows.qualify import qualify
from flows.qualify_device import qualify_device
from tests.fakes.authentic import decide
from tests.fakes.evidence import FP32, INT8, decision

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("flows")]

# int8 alone on the second: a kind may have fewer candidates, and this costs one search less.
DEVICES = """
[devices.one-thread]

[devices.two-threads]
candidates = ["onnxruntime-int8"]

[devices.two-threads.tables.onnxruntime]
threads = 2
"""


@pytest.fixture(scope="module")
def servers(family, tmp_path_factory):
    """A Triton for each kind, each with a repository of its own."""
    root = tmp_path_factory.mktemp("mixed")
    with (
        live_server(root / "live", family.workspace),
        live_server(root / "b", family.workspace, server_name="b") as second,
    ):
        yield root, second.grpc


@pytest.fixture(scope="module")
def mixed(qualified, family, servers):
    """The family's policy for processors with one thread and with two, a server of each."""
    del qualified  # what it measured is found again
    root, address = servers
    server = f'name = "b", endpoint = "{address}", repository = "{root}/b", device = "two-threads"'
    target = f"fleet = [{{ {server} }}]\n{DEVICES}\n[approval]"
    live = (f"{family.root}/live", f"{root}/live")
    return family.edited(root / "policy.toml", ("[approval]", target), live)


@pytest.fixture(scope="module")
def parts(mixed):
    """Made here, in this process: no worker is asked."""
    return {name: qualify_device(mixed, name) for name in ("one-thread", "two-threads")}


@pytest.fixture(scope="module")
def gathered(mixed, parts):
    del parts
    return qualify(mixed)


def test_kind_that_nobody_qualified_is_refused_by_name(mixed):
    """With the commands that bring its evidence; runs before the parts are made."""
    with pytest.raises(EnginegateError, match="one-thread: Nobody has qualified") as refusal:
        qualify(mixed)

    assert "two-threads: Nobody has qualified" in str(refusal.value)
    assert "--device two-threads" in str(refusal.value)


def test_pool_that_is_missing_is_refused_before_another_is_put_to_work(family, tmp_path):
    """A name that was mistyped would else be told after hours of the other pools' work."""
    kinds = '[devices.one]\npool = "there"\n\n[devices.two]\npool = "mistyped"\n\n[approval]'
    policy = family.edited(tmp_path / "policy.toml", ("[approval]", kinds))
    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name="there", type="process"))

        with pytest.raises(EnginegateError, match="no work pool") as refusal:
            qualify(policy)

        with pytest.raises(ObjectNotFound):
            client.read_deployment_by_name("qualify-device/tiny-one")
    assert "two: 'mistyped'" in str(refusal.value)
    assert "one" not in str(refusal.value).split("Nothing was started")[0].split()
    assert "prefect work-pool create mistyped" in str(refusal.value)


def test_worker_refuses_a_file_made_elsewhere_that_is_not_pinned(family, tmp_path):
    """Its part would be found again after somebody replaced the file."""
    (tmp_path / "qat.onnx").write_bytes(b"weights")
    made = f'made = [{{ file = "{tmp_path}/qat.onnx", precision = "int8", name = "qat" }}]'
    policy = family.edited(
        tmp_path / "policy.toml",
        ("[calibration]", f"{made}\n\n[calibration]"),
        ("[approval]", "[devices.one-thread]\n\n[approval]"),
    )

    with pytest.raises(PolicyError, match=r'it has no sha256.*set beside it: sha256 = "'):
        qualify_device(policy, "one-thread")


def test_scorecard_holds_every_kind_of_device(gathered):
    """One digest over all of them; each kind has its own engine, verdicts and winner."""
    one, two = gathered.by_device

    assert gathered.devices == ("one-thread", "two-threads")
    assert gathered.winner == one.winner
    assert two.winner.name == "onnxruntime-int8"
    assert {v.candidate.name for v in two.verdicts} == {"onnxruntime-int8"}
    assert gathered.golden.keys() >= {one.winner.name}
    assert gathered.further[0].golden.keys() == {"onnxruntime-int8"}
    assert not list(contradictions(gathered))


def test_engine_of_a_kind_runs_with_its_settings(mixed, parts, family):
    """Two threads in the manifest, and so in Triton; the usual one elsewhere."""
    store = PartStore(family.workspace)
    flags = {}
    for name, part in parts.items():
        (verdict,) = [v for v in part.evidence.verdicts if v.candidate.name == "onnxruntime-int8"]
        flags[name] = store.engine(part, verdict.candidate).value.flags["intra_op_threads"]

    assert flags == {"one-thread": "1", "two-threads": "2"}
    assert read_policy(mixed).device_names == ("one-thread", "two-threads")


def test_nothing_of_a_part_is_made_twice(mixed, parts, gathered, family):
    """A second run finds the very part, and the very scorecard."""
    files = sorted(family.workspace.results.rglob("*.json"))
    written = [path.stat().st_ino for path in files]

    assert qualify_device(mixed, "two-threads") == parts["two-threads"]
    assert qualify(mixed).digest == gathered.digest
    assert [path.stat().st_ino for path in files] == written


def test_tables_have_a_column_for_each_kind(gathered):
    """In the terminal and in Markdown, with the winner of each."""
    texts = scorecard_text(gathered, width=160), scorecard_markdown(gathered)

    for text in texts:
        assert "two-threads" in text
        assert "one approval covers the winners of all of them" in text
        assert "not there" in text


def test_mlflow_has_the_candidates_of_every_kind(gathered, family):
    """Each child run says on which kind it ran."""
    tracker = Tracker(family.workspace.tracking_uri, family.workspace.artifacts)
    parent = tracker.client.get_run(gathered.mlflow_run)
    children = tracker.client.search_runs(
        [parent.info.experiment_id],
        filter_string=f"tags.`mlflow.parentRunId` = '{gathered.mlflow_run}'",
    )

    devices = sorted(run.data.tags["device"] for run in children)
    assert devices == ["one-thread", "one-thread", "one-thread", "two-threads"]


def test_each_server_serves_the_engine_of_its_kind(mixed, gathered, family, servers):
    """One approval, one release: its engines differ in threads, digest, answers and promise."""
    decide(gathered, read_policy(mixed), family.workspace)
    root, _ = servers

    release = promote(mixed, gathered.digest)

    one, two = (Layout(folder, "tiny").release(1) for folder in (root / "live", root / "b"))
    assert release.devices == ("one-thread", "two-threads")
    assert one.digest == two.digest
    assert one.engine.engine_sha256 != two.engine.engine_sha256
    assert two.engine.settings.parameters["intra_op_threads"] == "2"
    assert not [c.problem for c in verify(_target(mixed, family)) if c.problem]
    assert promote(mixed, gathered.digest).digest == release.digest


def _target(policy, family):
    return open_target(read_policy(policy).live_tables, family.workspace)


def test_approval_cannot_name_one_candidate_for_several_kinds(mixed, gathered):
    rules = read_policy(mixed).approval
    named = decision(gathered, candidate=FP32 if gathered.winner != FP32 else INT8)

    said = objection(named, gathered, rules, now=named.decided_at)

    assert "several kinds of device (one-thread, two-threads)" in said


def test_machine_without_the_gpu_is_refused(mixed, tmp_path):
    """What it measured would be another kind's evidence."""
    text = mixed.read_text().replace("[devices.one-thread]", '[devices.one-thread]\ngpu = "L4"')
    policy = tmp_path / "policy.toml"
    policy.write_text(text)

    with pytest.raises(EnginegateError, match="has a GPU named 'L4'"):
        qualify_device(policy, "one-thread")
