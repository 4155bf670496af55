# ruff: noqa: INP001, T201, S310
"""Take the pictures of docs/images: decision pages, and a promotion approved in a real browser.

The decision pages are of the example decisions that tests have too. For the promotion everything
is started in a temporary folder and stopped at the end: a copy of this checkout, an MLflow and a
Prefect server, a worker, Triton. Qualifies the digits example, starts its promotion, fills in the
form, and fails unless the release is live afterwards. Takes three or four minutes.

Needs Chromium with its driver (Debian: ``apt-get install chromium chromium-driver``):

    make screenshots
    make screenshots ARGS=--pages    # only the decision pages, in seconds
"""

import argparse
import json
import tempfile
import urllib.request
from pathlib import Path

from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select

from docs.screenshots.camera import Camera, camera
from docs.screenshots.pages import take_pages
from docs.screenshots.stand import (
    CHECKOUT,
    POLICY,
    Stand,
    artifact,
    new_stand,
    promotion,
    qualify,
    reach,
    started,
)
from docs.screenshots.waiting import WAIT_S

_IMAGES = CHECKOUT / "docs" / "images"
_CHARTS = "perf/p"


def main() -> None:
    """Set everything up, take the pictures, check what is live."""
    options = _options()
    options.images.mkdir(exist_ok=True)
    with camera(options.images) as shown:
        take_pages(shown)
    if options.pages:
        return
    with tempfile.TemporaryDirectory(prefix="enginegate-") as folder:
        stand = new_stand(Path(folder), options.commands, options.home)
        print(f"setting up in {folder}")
        with started(stand):
            print("training, qualifying: about two minutes")
            run = promotion(stand, qualify(stand))
            with camera(options.images) as shown:
                _approve(stand, shown, run)
                _compare(stand, shown, run)
            _check_live(stand)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--home", type=Path, help="a workspace whose engines and measurements are taken over"
    )
    parser.add_argument(
        "--commands",
        type=Path,
        default=CHECKOUT / ".venv" / "bin",
        help="the folder of enginegate, prefect and mlflow",
    )
    parser.add_argument("--pages", action="store_true", help="only of decision pages")
    parser.add_argument("--images", type=Path, default=_IMAGES, help="where pictures go")
    return parser.parse_args()


def _approve(stand: Stand, shown: Camera, run: str) -> None:
    """From the waiting run to the release, as a person clicks it."""
    page = f"{stand.prefect}/runs/flow-run/{run}"
    card = artifact(stand, run, "scorecard", "")
    shown.open(page, height=1000)
    shown.click(_tab("Artifacts"))
    shown.text("scorecard-")
    shown.take("approving-suspended")
    shown.open(f"{stand.prefect}/artifacts/artifact/{card}", width=1700, height=1150)
    shown.text("An approval is for scorecard")
    shown.take("approving-scorecard")
    shown.open(page, height=1250)
    shown.click("//button[contains(., 'Resume')]")
    _fill_in(shown)
    shown.take("approving-form")
    shown.click("//button[normalize-space(.)='Submit']")
    reach(stand, run, "Completed")
    shown.open(page, height=1250)
    shown.click(_tab("Task Runs"))
    shown.text("move-champion")
    shown.take("approving-completed", settle_s=5.0)


def _fill_in(shown: Camera) -> None:
    decision = shown.element(By.CSS_SELECTOR, ".schema-form-properties select")
    Select(decision).select_by_visible_text("approve")
    fields = shown.browser.find_elements(By.CSS_SELECTOR, ".schema-form-properties textarea")
    for field, words in zip(fields, ("ada", "margins are wide"), strict=False):
        field.send_keys(words)


def _compare(stand: Stand, shown: Camera, run: str) -> None:
    """MLflow: every candidate beside the others, by the run's own link; and the alias."""
    link = stand.ask(f"/artifacts/{artifact(stand, run, 'scorecard', '-mlflow')}")["data"]
    address = link[link.index("](") + 2 : link.rindex(")")]
    shown.open(address, width=1500, height=1250)
    shown.text("onnxruntime-int8")
    shown.click("//button[@data-component-id='mlflow.assistant.chat_panel.close']")
    shown.element(By.CSS_SELECTOR, "input[placeholder='Search metric charts']").send_keys(_CHARTS)
    # The bar of each chart's tools shows when one points at it; without a pointer, always.
    hide = "document.head.append(Object.assign(document.createElement('style'), {textContent: %s}))"
    shown.browser.execute_script(hide % "'.modebar { display: none }'")
    shown.take("approving-mlflow", settle_s=6.0)
    shown.open(
        f"{stand.mlflow}/#/models/digits?workflowType=machine_learning", width=1500, height=900
    )
    shown.text("champion")
    shown.take("approving-champion")


def _check_live(stand: Stand) -> None:
    """Every digest, what the server serves, who said so, and MLflow's alias; else the exit code."""
    stand.run("enginegate", "verify", POLICY)
    status = stand.run("enginegate", "status", POLICY)
    log = stand.run("enginegate", "audit", POLICY, "--json")
    alias = f"{stand.mlflow}/api/2.0/mlflow/registered-models/alias?name=digits&alias=champion"
    with urllib.request.urlopen(alias, timeout=WAIT_S) as reply:
        champion = json.loads(reply.read())["model_version"]["version"]
    said = [(event["event"], event["who"]) for event in map(json.loads, log.splitlines())]
    if "live: release 1," not in status or champion != "1" or ("approved", "ada") not in said:
        raise SystemExit(f"Not live, or not as approved: champion {champion}, {said}\n{status}")
    print("release 1 is live as ada approved it, and verifies")


def _tab(name: str) -> str:
    return f"//*[contains(@class, 'tab')][normalize-space(.)='{name}']"


if __name__ == "__main__":
    main()
