"""A project that has been in use for months."""

import pytest

from tests.fakes.kept import KeptProject


@pytest.fixture
def project(tmp_path):
    """It has no engine, scorecard or release yet."""
    return KeptProject(tmp_path)
