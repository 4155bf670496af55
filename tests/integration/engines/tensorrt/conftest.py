"""A Python of its own with a TensorRT, for faults that a real one cannot be made to have."""

import sys
from pathlib import Path

import pytest

FAKE = Path(__file__).parents[3] / "fakes" / "foreign_tensorrt.py"


@pytest.fixture
def foreign(tmp_path):
    """An interpreter of its own, with a TensorRT that exists nowhere else."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    path.chmod(0o755)
    return str(path)
