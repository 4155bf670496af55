"""Policies -> deployments on a Prefect server, from an installed package; no checkout is needed.

`prefect.yaml` says the same of a checkout. A worker gets no code: it has Enginegate installed, and
the pull step changes into the project and opens the door to the flows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from prefect.utilities.callables import parameter_schema
from prefect.workers.process import ProcessWorker

from enginegate.errors import EnginegateError, InputError
from enginegate.policy import Policy, read_policy
from enginegate.redact import masked
from flows.promote import promote
from flows.qualify import qualify
from flows.rollback import rollback
from flows.scan import scan
from flows.watch import watch
from tasks.prefect_server import REFUSALS

_PULL_STEP = "enginegate.pipeline.enter_project"
# What Enginegate logs is a flow run's log too; a thread outside of any run is none.
_ENVIRONMENT = {
    "PREFECT_LOGGING_EXTRA_LOGGERS": "enginegate",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    # The server's answer while its database restarts: a run asks again for a minute.
    "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",
}


@dataclass(frozen=True, slots=True)
class DeployedFlow:
    """How one flow is deployed for every policy.

    Attributes:
        flow: of the module that is named after it.
        description: for people.
        collision: a second run while one is under way; None: both run.
        cron: when it starts by itself, in UTC; empty: never.
        slug: of that schedule.
    """

    flow: Flow[..., Any]
    description: str
    collision: ConcurrencyLimitStrategy | None = None
    cron: str = ""
    slug: str = ""

    @property
    def entrypoint(self) -> str:
        """The module path by which a worker imports it."""
        return f"flows.{self.flow.name}.{self.flow.name}"


FLOWS = (
    DeployedFlow(
        qualify,
        "Build, judge and benchmark every candidate of a registered model version.",
        # One at a time: two benchmarks on one machine would measure each other.
        ConcurrencyLimitStrategy.ENQUEUE,
    ),
    DeployedFlow(promote, "Wait for a person's decision on a scorecard, then publish its winner."),
    DeployedFlow(rollback, "Make an earlier release live again."),
    DeployedFlow(
        watch,
        "Watch what is live, verify the repository, delete what is too old or nothing refers to.",
        # A run watches a young release for up to nine minutes; the next one goes on.
        ConcurrencyLimitStrategy.CANCEL_NEW,
        "*/10 * * * *",
        "every-ten-minutes",
    ),
)
# For a policy with a [scan] table.
SCAN = DeployedFlow(
    scan,
    "Qualify each version of the registry that carries the policy's alias or tag, once.",
    cron="*/5 * * * *",
    slug="every-five-minutes",
)


def deploy_policies(
    policies: Sequence[Path], pool: str, directory: Path | None = None
) -> tuple[str, ...]:
    """Create every deployment of these policies, or update it; a person's schedules stay.

    Args:
        policies: files; each is deployed as ``qualify/qualify-NAME`` and so on.
        pool: the work pool, made as one of processes where there is none of that name.
        directory: the project's folder on the workers; None: as it is here.

    Returns:
        The names of the deployments, as Prefect's commands take them.

    Raises:
        PolicyError: a policy cannot be read.
        InputError: no Prefect server is named, or two policies have one model's name.
        EnginegateError: the server cannot be reached, or refuses.
    """
    server = PREFECT_API_URL.value()
    if not server:
        raise InputError(
            "No Prefect server is named, so there is none to deploy to. Set PREFECT_API_URL, e.g. "
            "http://127.0.0.1:4200/api, and run this again."
        )
    opened: dict[str, tuple[Path, Policy]] = {}
    for path in policies:
        rules = read_policy(path)
        if rules.name in opened:
            raise InputError(
                f"{path} and {opened[rules.name][0]} are both for the model {rules.name!r}, so "
                "their deployments would have the same names. Deploy one of them."
            )
        opened[rules.name] = (path, rules)
    wanted = [
        (path, rules, deployed)
        for path, rules in opened.values()
        for deployed in (*FLOWS, *([SCAN] if rules.scan.alias or rules.scan.tag else []))
    ]
    try:
        with get_client(sync_client=True) as client:
            _ensure_pool(client, pool)
            return tuple(
                _deploy(
                    client,
                    deployed,
                    rules.name,
                    _arguments(path, rules, deployed),
                    {
                        "work_pool_name": pool,
                        "pull_steps": [{_PULL_STEP: {"directory": str(directory or rules.root)}}],
                    },
                )
                for path, rules, deployed in wanted
            )
    except REFUSALS as error:
        raise EnginegateError(
            f"The Prefect server {masked(server)} did not take the deployments: "
            f"{masked(str(error))}. What it took is updated, not doubled, when this runs again."
        ) from error


def _ensure_pool(client: SyncPrefectClient, pool: str) -> None:
    try:
        client.read_work_pool(pool)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(
            WorkPoolCreate(name=pool, type=ProcessWorker.type, base_job_template=template)
        )


def _arguments(path: Path, rules: Policy, deployed: DeployedFlow) -> dict[str, str]:
    """What its runs are given: the policy as a path from its project, wherever a worker has it."""
    policy = str(path.absolute().relative_to(rules.root or path.absolute().parent))
    by = f"{qualify.name}/{qualify.name}-{rules.name}"
    return {"policy": policy, "deployment": by} if deployed is SCAN else {"policy": policy}


def _deploy(
    client: SyncPrefectClient,
    deployed: DeployedFlow,
    model: str,
    arguments: dict[str, str],
    place: dict[str, Any],
) -> str:
    """Create it, or update it; its name. ``place`` says which pool runs it, and in which folder."""
    flow, name = deployed.flow, f"{deployed.flow.name}-{model}"
    collision = deployed.collision
    client.create_deployment(
        flow_id=client.create_flow(flow),
        name=name,
        entrypoint=deployed.entrypoint,
        description=deployed.description,
        tags=["enginegate", flow.name],
        parameters=arguments,
        parameter_openapi_schema=parameter_schema(flow).model_dump_for_openapi(),
        enforce_parameter_schema=True,
        concurrency_limit=1 if collision else None,
        concurrency_options=ConcurrencyOptions(collision_strategy=collision) if collision else None,
        schedules=_schedules(client, deployed, f"{flow.name}/{name}"),
        job_variables={"env": _ENVIRONMENT},
        **place,
    )
    return f"{flow.name}/{name}"


def _schedules(
    client: SyncPrefectClient, deployed: DeployedFlow, name: str
) -> list[DeploymentScheduleCreate]:
    """Those that the deployment has, which a person may have changed or paused; else ours."""
    try:
        there = client.read_deployment_by_name(name).schedules
    except ObjectNotFound:
        ours = CronSchedule(cron=deployed.cron, timezone="UTC") if deployed.cron else None
        return [DeploymentScheduleCreate(schedule=ours, slug=deployed.slug)] if ours else []
    return [
        DeploymentScheduleCreate(
            schedule=each.schedule,
            active=each.active,
            max_scheduled_runs=each.max_scheduled_runs,
            parameters=each.parameters,
            slug=each.slug,
        )
        for each in there
    ]
