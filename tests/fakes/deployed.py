"""Runs of a deployed flow without a worker: what a worker does in a process a step, in one call."""

import uuid

import pytest
from prefect.client.orchestration import get_client
from prefect.flow_engine import run_flow
from prefect.states import Pending

from flows.promote import promote


class Deployed:
    """A run of the promote flow."""

    def __init__(self, policy, scorecard):
        with get_client(sync_client=True) as client:
            deployment = client.create_deployment(
                flow_id=client.create_flow(promote),
                name=f"test-{uuid.uuid4().hex[:6]}",
                entrypoint="flows.promote.promote",
            )
            parameters = {"policy": str(policy), "scorecard": scorecard}
            self.id = client.create_flow_run_from_deployment(deployment, parameters=parameters).id

    def step(self):
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(self.id, Pending())
            run = client.read_flow_run(self.id)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PREFECT__FLOW_RUN_ID", str(self.id))
            return run_flow(promote, flow_run=run, parameters=run.parameters)

    @property
    def state(self):
        with get_client(sync_client=True) as client:
            return client.read_flow_run(self.id).state.name
