"""docs/shadow.md says what the program does."""

import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from enginegate.policy.recording import Shadow
from enginegate.shadow.record_batch import STAGES

PAGE = (Path(__file__).parents[3] / "docs" / "shadow.md").read_text()


def test_slicer_on_the_page_works():
    """The example, pasted, gives one text for each row."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {}

    exec(code, names)  # noqa: S102

    tokens = np.ones((2, 200), np.int64)
    tokens[0, 5:] = 0
    assert names["by_length"]({"input_ids": tokens}) == {"length": ["short", "long"]}


def test_columns_on_the_page_are_those_that_are_written(block_of):
    """Each column of a sample is on the page, and no other."""
    table = PAGE.split("## What is kept")[1].split("## Privacy")[0]
    told = set(
        re.findall(
            r"`([a-z_.]+?)(?:\.[A-Z]+)?`", "".join(re.findall(r"^\| `.*?\|", table, re.MULTILINE))
        )
    )
    written = set(block_of().columns())

    assert {f"stage.{stage}_us" for stage in STAGES} <= told
    assert {name.partition(".")[0] if "stage" not in name else name for name in written} <= told
    assert told <= {*written, "input", "output", "slice", "hash"}


def test_keys_on_the_page_are_the_policys():
    """Every key of [shadow] is explained there."""
    prose = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    told = " ".join(re.findall(r"`[^`]+`", prose))

    assert [key for key in Shadow.model_fields if not re.search(rf"\b{key}\b", told)] == []


@pytest.mark.parametrize("place", ["clusters", "route_config"])
def test_envoy_configuration_is_yaml(place):
    """The mirrored cluster is the one that is defined, and only inference is mirrored."""
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    found = yaml.safe_load(text)

    first, rest = found["route_config"]["virtual_hosts"][0]["routes"]
    (mirror,) = first["route"]["request_mirror_policies"]
    assert place in found
    assert mirror["cluster"] in {cluster["name"] for cluster in found["clusters"]}
    assert first["match"]["prefix"].endswith("/ModelInfer")
    assert "request_mirror_policies" not in rest["route"]
