"""A live repository with two releases, for each file of this folder."""

import pytest
from prefect.events.clients import AssertingEventsClient
from prefect.events.worker import EventsWorker

from enginegate.decision import Promise
from enginegate.engines import open_engine, serving
from enginegate.policy import read_policy
from enginegate.repository import (
    Golden,
    LiveRepository,
    Package,
)
from enginegate.triton.endpoint import live_server
from enginegate.workspace import Workspace
from tasks.build import build, export
from tests.fakes.evidence import FP32, SERVING, decision, scorecard
from tests.fakes.family import classifier, register, samples

_WATCH = """
[watch]
look_s = 0.3
p99_over_promise = 1000
min_requests = 5
window_s = 600
"""


@pytest.fixture(scope="module")
def policy(family, tmp_path_factory):
    """The family's, with short checks and a live repository of its own."""
    root = tmp_path_factory.mktemp("watched")
    path = family.edited(root / "policy.toml", (f"{family.root}/live", f"{root}/live"))
    path.write_text(path.read_text() + _WATCH)
    return path


@pytest.fixture(scope="module")
def released(policy, family):
    """Two releases of the FP32 engine, of two registered versions, the second one live."""
    rules, serving_as = read_policy(policy), SERVING.model_copy(update={"max_batch_size": 4})
    workspace = Workspace.of(rules)
    source = export.fn(rules.model, rules.data.evaluation, workspace)
    engine = build.fn(FP32, rules.engine_tables, source, workspace)
    served = serving(engine.value, engine.folder)
    inputs = dict(samples(8, 6).inputs)
    with open_engine(engine.value, engine.folder) as runner:
        golden = Golden(inputs, runner.run(inputs))
    with live_server(rules.target.repository, family.workspace) as server, server.client() as asker:
        repository = LiveRepository(rules.target.repository, asker)
        for before, uri in [
            (None, "models:/tiny/1"),
            (1, register(family.workspace, classifier())),
        ]:
            card = scorecard(model="tiny", model_uri=uri, onnx_sha256=source.value.file.sha256)
            family.workspace.save_scorecard(card)
            package = Package(
                model="tiny",
                model_uri=uri,
                candidate=FP32,
                engine_sha256=engine.value.file.sha256,
                approved={engine.value.filename: engine.value.file},
                files=dict(served.files),
                backend=served.backend,
                gpu=served.gpu,
                inputs=engine.value.inputs,
                outputs=engine.value.outputs,
                serving=serving_as,
                golden=golden,
                golden_max_abs_error=1e-3,
                scorecard_sha256=card.digest,
                decision=decision(card),
                promise=Promise(p99_ms=9, throughput_per_s=400, slo_p99_ms=250, server_ms=2),
            )
            repository.publish(package, expected=before)
        yield policy


@pytest.fixture
def alerts(prefect_server, monkeypatch):
    """What Prefect would have been told, caught by its own client for tests."""
    del prefect_server  # it only has to run
    worker = EventsWorker.instance(AssertingEventsClient)
    monkeypatch.setattr(EventsWorker, "instance", lambda *_: worker)

    def told():
        worker.wait_until_empty()
        sent = worker._client.events
        return [event.payload for event in sent if event.event == "enginegate.watch.failed"]

    yield told
    worker.drain()
