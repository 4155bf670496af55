# ruff: noqa: INP001
"""Pictures of MLflow's pages: what the links of a qualification open, and the registry."""

import re

from docs.screenshots.camera import Camera
from docs.screenshots.stand import Stand, artifacts

_ASSISTANT = "//button[@data-component-id='mlflow.assistant.chat_panel.close']"
# The bar of each chart's tools shows when one points at it; without a pointer, always.
_STYLE = """document.head.append(Object.assign(document.createElement('style'),
    {textContent: '.modebar { display: none }'}))"""
_SETTLED_S = 6.0


def take_comparison(stand: Stand, shown: Camera, run: str) -> None:
    """What the links that a qualification leaves open: the table, its charts, the decision page.

    Args:
        run: of the qualification, in Prefect.
    """
    left = artifacts(stand, run)["links-digits"]["data"]
    page, table, *_ = re.findall(r"\]\((http\S+)\)", left)
    shown.open(table)
    shown.text("onnxruntime-int8")
    shown.click(_ASSISTANT)
    shown.take("mlflow-candidates", settle_s=_SETTLED_S)
    shown.open(f"{table}&compareRunsMode=CHART")
    shown.text("p99")
    shown.browser.execute_script(_STYLE)
    shown.take("mlflow-charts", settle_s=_SETTLED_S)
    shown.open(page)
    shown.text("decision.html")
    shown.take("mlflow-decision", settle_s=_SETTLED_S)


def take_registry(stand: Stand, shown: Camera) -> None:
    """The model's versions, and the page of the one that is live."""
    training = "workflowType=machine_learning"
    shown.open(f"{stand.mlflow}/#/models/digits?{training}")
    shown.text("champion")
    shown.take("mlflow-registry")
    shown.open(f"{stand.mlflow}/#/models/digits/versions/1?{training}")
    shown.text("champion")
    shown.take("mlflow-version")
