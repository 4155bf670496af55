"""Golden files: ``ENGINEGATE_WRITE_GOLDEN=1 pytest tests/unit/report`` writes them anew."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parents[2] / "golden"


@pytest.fixture
def is_golden() -> Callable[[str, str], bool]:
    """Whether a text equals the golden file of that name."""

    def compare(text: str, name: str) -> bool:
        path = _FOLDER / name
        if os.environ.get("ENGINEGATE_WRITE_GOLDEN"):
            path.write_text(text)
        assert text == path.read_text()
        return True

    return compare
