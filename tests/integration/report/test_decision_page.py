"""The decision page in a real browser: without a network, on a phone, in print, for everybody.

`make test` loads the page that has most on it, `make test-all` each of the examples.
"""

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.decision_cases import DecisionCase, decision_cases

if TYPE_CHECKING:
    from docs.screenshots.camera import Camera, Scheme

# One browser for all of them, whichever process they run in.
pytestmark = pytest.mark.xdist_group("browser")

_AXE = Path(__file__).parents[3] / "requirements" / "node_modules" / "axe-core" / "axe.min.js"
_PHONE = 400
_MOST_BYTES = 150_000
_SHEETS = 2
# WCAG 2.2 AA is what the page claims; the others are what axe's authors call good practice.
_RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
_USUAL = {"clear-win", "tie", "failure", "rolled-back"}


def _each_case() -> Iterator[Any]:
    """Every case, of which only the one with a history is for every run."""
    for case in decision_cases():
        lanes = () if case.name == "rolled-back" else (pytest.mark.every_page,)
        yield pytest.param(case, id=case.name, marks=lanes)


@pytest.fixture(scope="module")
def camera(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Camera"]:
    """One browser for this module, which can fetch nothing."""
    programs = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if programs:
        pytest.skip(f"{' and '.join(programs)} not found: apt-get install chromium chromium-driver")
    libraries = [name for name in ("selenium", "pypdfium2") if find_spec(name) is None]
    if libraries:
        pytest.skip(f"{' and '.join(libraries)} not installed: pip install 'enginegate[dev]'")
    from docs.screenshots.camera import camera as started

    with started(tmp_path_factory.mktemp("pictures")) as one:
        one.go_offline()
        yield one


@pytest.fixture(params=_each_case())
def page(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[DecisionCase, str]:
    """A case, and the address of its page."""
    case: DecisionCase = request.param
    path = tmp_path / "decision.html"
    path.write_text(case.page, encoding="utf-8")
    return case, path.as_uri()


def test_it_is_whole_without_a_network(camera: "Camera", page: tuple[DecisionCase, str]):
    """It asks for nothing but itself, complains of nothing, and is small enough for an e-mail."""
    case, address = page
    camera.open("about:blank")
    camera.requests()
    camera.complaints()

    camera.open(address)

    assert case.scorecard.model in camera.browser.find_element("tag name", "h1").text + (
        camera.browser.find_element("id", "verdict").text
    )
    assert [asked for asked in camera.requests() if not asked.startswith("data:")] == [address]
    assert camera.complaints() == []
    assert len(case.page.encode()) <= _MOST_BYTES


def test_it_fits_a_phone(camera: "Camera", page: tuple[DecisionCase, str]):
    """At 400 pixels nothing is wider than the window, whatever is folded out."""
    _, address = page
    camera.open(address, width=_PHONE, height=860)

    script = """
        document.querySelectorAll('details').forEach(each => each.open = true);
        const frames = [...document.querySelectorAll('*')].filter(
            each => ['auto', 'scroll'].includes(getComputedStyle(each).overflowX));
        const wide = [...document.querySelectorAll('body *')].filter(each =>
            each.getBoundingClientRect().right > innerWidth + 1
            && !frames.some(frame => frame !== each && frame.contains(each))
            && !each.closest('.visually-hidden, svg'));
        return [document.documentElement.scrollWidth, wide.map(each => each.outerHTML.slice(0, 90))]
    """
    width, wide = camera.browser.execute_script(script)

    assert width <= _PHONE
    assert wide == []


def test_every_chart_is_told_in_words(camera: "Camera", page: tuple[DecisionCase, str]):
    """A screen reader says of each chart what it shows; only ornaments are silent."""
    _, address = page
    camera.open(address)
    open_all = "document.querySelectorAll('details').forEach(each => each.open = true)"
    camera.browser.execute_script(open_all)

    charts = camera.browser.find_elements("css selector", "svg, canvas, img")
    silent = [each.get_attribute("outerHTML")[:90] for each in charts if not _speaks(each)]

    assert silent == []


def test_it_prints_on_two_sheets(camera: "Camera", page: tuple[DecisionCase, str]):
    """A usual decision is two sheets of A4, and what makes it one is on the first."""
    from pypdfium2 import PdfDocument

    case, address = page
    camera.open(address)

    document = PdfDocument(camera.printed())
    sizes = {tuple(round(points) for points in sheet.get_size()) for sheet in document}
    first = " ".join(document[0].get_textpage().get_text_bounded().split())
    sheets = len(document)
    document.close()

    assert sizes == {(595, 842)}
    assert case.scorecard.model in first
    assert case.scorecard.digest[:12] in first
    if case.name in _USUAL:
        assert sheets <= _SHEETS


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation(camera: "Camera", page: tuple[DecisionCase, str], scheme: "Scheme"):
    """Contrast, names, headings, roles and order of focus, with everything folded out."""
    if not _AXE.is_file():
        pytest.skip(f"{_AXE} not found: apt-get install npm, then make npm")
    _, address = page
    camera.open(address, scheme=scheme)
    script = """
        const [rules, done] = arguments;
        document.querySelectorAll('details').forEach(each => each.open = true);
        axe.run(document, {runOnly: rules}).then(
            found => done([found.passes.length, found.violations.map(each =>
                [each.id, each.help, ...each.nodes.slice(0, 3).map(node => node.html.slice(0, 160))]
            )]), error => done([0, [String(error)]]));
    """
    camera.browser.execute_script(_AXE.read_text(encoding="utf-8"))

    passed, violations = camera.browser.execute_async_script(script, _RULES)

    assert violations == []
    assert passed > 10


def _speaks(chart: Any) -> bool:
    """Whether a picture has a name, is in something that has, or says that it is an ornament."""
    hidden = "return arguments[0].closest('[aria-hidden=true]') !== null"
    if chart.accessible_name.strip():
        return True
    ornament = chart.size["width"] <= 32 or (chart.tag_name == "svg" and _in_named(chart))
    return bool(chart.parent.execute_script(hidden, chart)) and ornament


def _in_named(chart: Any) -> bool:
    find = "return arguments[0].closest('[role=img][aria-label], [role=img][aria-labelledby]')"
    return chart.parent.execute_script(find, chart) is not None
