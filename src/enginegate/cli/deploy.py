"""`enginegate deploy`: the flows on a Prefect server, for workers that have this package."""

from pathlib import Path
from typing import Annotated

import typer

from enginegate.cli.output.json_output import JsonFlag, printing
from enginegate.cli.output.records import DeployDocument
from enginegate.cli.policies import policies_of
from enginegate.pipeline import pipeline_module
from enginegate.report.tables import print_hanging


def deploy_command(
    policies: Annotated[list[Path] | None, typer.Argument(metavar="[POLICY]…")] = None,
    pool: Annotated[str, typer.Option(help="work pool; created if there is none")] = "enginegate",
    directory: Annotated[
        Path | None,
        typer.Option(help="the project's folder on the workers; default: the one here"),
    ] = None,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Create or update the deployments of policies on your Prefect server; no checkout needed.

    They are qualify, promote, rollback and watch (every ten minutes), and scan for a policy that
    has a table of that name; default: all policies of policies/. Schedules that are there already
    stay as they are. Workers need this package and the project's folder.
    """
    with printing(as_json=as_json) as output:
        module = pipeline_module("flows.deployments")
        done: tuple[str, ...] = module.deploy_policies(policies_of(policies), pool, directory)
        for name in done:
            print_hanging(output.console, name)
        output.console.print(
            f"Next: prefect worker start --pool {pool}", markup=False, soft_wrap=True
        )
        output.document(DeployDocument(pool=pool, deployments=done))
