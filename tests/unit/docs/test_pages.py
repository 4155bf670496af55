"""Pages under docs/ say what the program does."""

import re
import runpy
import tomllib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from enginegate.candidate import Precision
from enginegate.data_sources import load_data
from enginegate.measuring.p99 import fewest_requests
from enginegate.policy import read_policy
from enginegate.policy.data import Data
from enginegate.policy.tolerances import STANDARD
from validation.checks import RULES
from validation.expectations import OURS
from validation.speedup import GATE
from validation.statistics import Pairs, Share, loss_interval, quantile_interval, share_interval

ROOT = Path(__file__).parents[3]
PICTURES = runpy.run_path(str(ROOT / "docs" / "draw_pictures.py"))["PICTURES"]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_CODE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
_NEXT_PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.|#+) )|(?<=[^\\])\|")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_paragraph_is_too_long_to_read_in_one_go(page):
    """Paragraphs, list items and cells of tables have at most 80 words."""
    paragraphs = _NEXT_PARAGRAPH.split(_CODE.sub("\n\n", page.read_text()))

    assert [(len(p.split()), p.strip()[:60]) for p in paragraphs if len(p.split()) > 80] == []


def test_the_first_screen_of_the_readme_is_short():
    """A picture comes first, and what the program prints takes 15 lines at most."""
    readme = (ROOT / "README.md").read_text()
    outputs = re.findall(r"^```text\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)

    assert readme.splitlines()[2].startswith("![")
    assert sum(len(output.splitlines()) for output in outputs) <= 15


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_current_and_described(name):
    """Each is what docs/draw_pictures.py draws (run it when this fails), and described."""
    drawn = (ROOT / "docs" / "images" / f"{name}.svg").read_text()

    assert drawn == PICTURES[name]().svg()
    assert re.search(r"<title[^>]*>[^<]{20,}</title>\n<desc[^>]*>[^<]{80,}</desc>", drawn)


def test_policy_reference_is_current():
    """docs/policy.md is what its script writes now; run the script when this fails."""
    script = runpy.run_path(str(ROOT / "docs" / "write_policy_reference.py"))

    assert (ROOT / "docs" / "policy.md").read_text() == script["reference"]()


def test_json_reference_is_current():
    """docs/json.md is what its script writes now; run the script when this fails."""
    script = runpy.run_path(str(ROOT / "docs" / "write_json_reference.py"))

    assert (ROOT / "docs" / "json.md").read_text() == script["json_reference"]()


def test_every_key_is_described():
    """No key of a policy is left without its meaning."""
    keys = re.findall(r"^\| `.+$", (ROOT / "docs" / "policy.md").read_text(), re.MULTILINE)

    assert len(keys) > 45
    assert all(re.search(r"\| [^|]{8,} \|$", key.replace("\\|", "")) for key in keys)


def test_example_policy_is_valid_and_explained():
    """The example states every key, each below a comment, and the checker takes it."""
    path = ROOT / "policies" / "digits.toml"
    policy = read_policy(path)
    lines = path.read_text().splitlines()
    bare = [
        line
        for before, line in pairwise(lines)
        if re.match(r"[a-z_0-9]+ = ", line) and not re.match(r"#|[a-z_0-9]+ = ", before)
    ]

    assert policy.name == "digits"
    assert len(policy.candidates.all()) == 3
    assert [line for line in bare if not line.startswith("max_")] == []


def test_data_page_runs(tmp_path, monkeypatch):
    """The code on the page, pasted in order, works."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "data.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)

    assert len(blocks) == 3
    Path("ours.py").write_text(blocks[0])
    exec("\n".join(blocks), {})  # noqa: S102
    source = Data.model_validate({"evaluation": "python:ours:samples", "allow_code": True})
    with monkeypatch.context() as path:
        path.syspath_prepend(tmp_path)
        assert len(load_data(source.evaluation)) == 100


def test_data_tables_of_the_page_are_valid():
    """Each [data] on the page is one that a policy may have."""
    page = (ROOT / "docs" / "data.md").read_text()
    tables = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", page, re.DOTALL)]

    read = [Data.model_validate(table["data"]) for table in tables]

    assert read[0].columns.inputs["features"].columns == ("age", "bmi", "pulse")
    assert read[1].images.crop == (224, 224)


def loss_high(samples):
    return loss_interval(Pairs(lost=0, gained=0, samples=samples), 0.95).high


@pytest.mark.parametrize(
    ("key", "settled"),
    [
        ("max_accuracy_loss = 0.01", lambda n: loss_high(n) <= 0.01),
        ("max_accuracy_loss = 0.001", lambda n: loss_high(n) <= 0.001),
        ("min_top1_agreement = 0.99", lambda n: share_interval(Share(n, n), 0.95).low >= 0.99),
        (
            "max_kl_p99_nats`, any limit",
            lambda n: np.isfinite(quantile_interval(np.arange(float(n)), 0.99, 0.95).high),
        ),
        ("max_slice_accuracy_loss", lambda n: loss_high(n) <= 0.08),
    ],
)
def test_sample_counts_on_the_data_page(key, settled):
    """Each count settles its limit, and one sample fewer does not."""
    row = next(r for r in (ROOT / "docs" / "data.md").read_text().splitlines() if f"`{key}" in r)
    count = int(row.split("|")[2])

    assert settled(count)
    assert not settled(count - 1)


def test_standard_tolerances_on_the_gates_page():
    """The table of standard tolerances is the one that policies get."""
    page = (ROOT / "docs" / "gates.md").read_text()
    columns = [Precision.FP32, Precision.FP16, Precision.BF16, Precision.INT8, Precision.FP8]

    for key in STANDARD[Precision.FP32]:
        row = next(line for line in page.splitlines() if re.match(rf"\| `{key}` \| [\d]", line))
        shown = [float(cell) for cell in row.split("|")[2:-1]]
        assert shown == [STANDARD[precision][key] for precision in columns]
    assert STANDARD[Precision.TF32] == STANDARD[Precision.FP16]


def test_every_gate_is_on_its_page():
    """No gate decides without being explained; nor is one explained that does not exist."""
    page = (ROOT / "docs" / "gates.md").read_text()

    assert [name for name in RULES if f"`{name}`" not in page] == []
    assert [name for name in OURS if f"`{name}`" not in page] == []


def test_request_counts_on_the_serving_page():
    """How many requests show that a p99 is met, with so many over the limit."""
    rows = [line.split("|")[1:-1] for line in _serving_page().splitlines() if "|" in line]
    over = next(row[1:] for row in rows if row[0].strip() == "over the limit")

    for confidence in (0.95, 0.99):
        shown = next(row[1:] for row in rows if row[0].strip() == f"requests at {confidence}")
        counts = [int(cell.replace(",", "")) for cell in shown]
        assert counts == [fewest_requests(int(k), confidence=confidence) for k in over]


def test_gates_and_files_on_the_serving_page():
    """Every gate of a benchmark and everything that is written is explained."""
    named = (GATE, "p99_ms", "throughput", "serving.html", "serving.json", "config.pbtxt")

    assert [name for name in named if f"`{name}`" not in _serving_page()] == []


def _serving_page() -> str:
    return (ROOT / "docs" / "serving.md").read_text()
