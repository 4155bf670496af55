# ruff: noqa: INP001
"""Pictures of Prefect's pages: a qualification, and a promotion that a person approves there."""

from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select

from docs.screenshots.camera import Camera
from docs.screenshots.stand import Stand, artifacts, reach

_CANDIDATES = "candidates-digits"
_LINKS = "links-digits"
_LIVE = "live-digits"
_SETTLED_S = 5.0


def take_qualification(stand: Stand, shown: Camera, run: str) -> None:
    """The run with its tasks, its artifacts, and the table among these."""
    left = artifacts(stand, run)
    shown.open(_run(stand, run), height=1200)
    shown.click(tab("Artifacts"))
    shown.text(_CANDIDATES)
    shown.take("prefect-qualification", settle_s=_SETTLED_S)
    shown.open(f"{stand.prefect}/artifacts/artifact/{left[_CANDIDATES]['id']}")
    shown.text("onnxruntime-int8")
    shown.take("prefect-candidates")
    shown.open(f"{stand.prefect}/artifacts/artifact/{left[_LINKS]['id']}")
    shown.text("Decision page")
    shown.take("prefect-links")


def take_approval(stand: Stand, shown: Camera, run: str) -> None:
    """From the waiting run to the release, as a person clicks it."""
    shown.open(_run(stand, run))
    shown.click(tab("Task Runs"))
    shown.take("prefect-waiting", settle_s=_SETTLED_S)
    shown.click("//button[contains(., 'Resume')]")
    _fill_in(shown)
    shown.take("prefect-form")
    shown.click("//button[normalize-space(.)='Submit']")
    reach(stand, run, "Completed")
    shown.open(_run(stand, run), height=1100)
    shown.click(tab("Task Runs"))
    shown.text("move-champion")
    shown.take("prefect-promoted", settle_s=_SETTLED_S)


def take_watch(stand: Stand, shown: Camera, policy: str) -> None:
    """The timeline of what is live, which promotions and checks extend."""
    stand.run("enginegate", "watch", policy, "--once")
    shown.open(f"{stand.prefect}/artifacts/key/{_LIVE}")
    shown.text("promise")
    shown.take("prefect-watch")


def tab(name: str) -> str:
    """The tab of a run's page, as an XPath."""
    return f"//*[contains(@class, 'tab')][normalize-space(.)='{name}']"


def _fill_in(shown: Camera) -> None:
    decision = shown.element(By.CSS_SELECTOR, ".schema-form-properties select")
    Select(decision).select_by_visible_text("approve")
    fields = shown.browser.find_elements(By.CSS_SELECTOR, ".schema-form-properties textarea")
    for field, words in zip(fields, ("ada", "margins are wide"), strict=False):
        field.send_keys(words)


def _run(stand: Stand, run: str) -> str:
    return f"{stand.prefect}/runs/flow-run/{run}"
