"""The lab of `tests.fakes.lab`, made once."""

from dataclasses import replace

import pytest

from tests.fakes.lab import Lab, make_lab
from validation.outputs import OutputSpec


@pytest.fixture(scope="session")
def lab(tmp_path_factory) -> Lab:
    """One output; the reference is right on almost all samples."""
    return make_lab(tmp_path_factory.mktemp("lab"), heads=("logits",))


@pytest.fixture(scope="session")
def two_heads(tmp_path_factory) -> Lab:
    """Two outputs of one shape: the same classes, seen by two heads."""
    lab = make_lab(tmp_path_factory.mktemp("two-heads"), heads=("left", "right"))
    asked = tuple(OutputSpec(name, alone=True) for name in ("left", "right"))
    return replace(lab, asked=asked)
