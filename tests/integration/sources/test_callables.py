"""Functions that return a module become ONNX once the policy allows their code to run."""

import re
from pathlib import Path

import pytest

from enginegate.errors import ModelError

pytestmark = [pytest.mark.xdist_group("sources"), pytest.mark.usefixtures("importable")]
ROOT = Path(__file__).parents[3]


def test_module_with_examples_and_axes(export, tokens, tmp_path):
    """A function's module exports with the axes that the function names."""
    found = export("python:toy_models:tokens", tmp_path, data=tokens, allow_code=True).value

    assert [spec.shape for spec in found.inputs] == [(-1, -1), (-1, -1)]
    assert found.proven_lengths == {"sequence": (1, 6, 11, 12)}
    assert (found.parity_samples, found.outputs[0].name) == (16, "logits")


def test_axis_with_bounds(export, samples, tmp_path):
    """Sizes below the bound are not asked of the model."""
    found = export("python:toy_models:bounded", tmp_path, data=samples, allow_code=True).value

    assert found.inputs[0].shape == (-1, 1, -1, 8)
    assert found.proven_lengths == {"height": (7, 8)}


def test_function_on_the_page(export, tokens, tmp_path, monkeypatch):
    """The example in docs/sources.md works as it stands."""
    page = (ROOT / "docs" / "sources.md").read_text()
    block = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    (tmp_path / "page_model.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    ids = {"input_ids": tokens.inputs["input_ids"]}
    data = type(tokens)("ids.npz", ids, None, tokens.ids, {})

    found = export("python:page_model:make", tmp_path / "onnx", data=data, allow_code=True)

    assert found.value.proven_lengths == {"sequence": (1, 6, 11, 12)}


def test_is_not_imported_without_permission(export, tokens, tmp_path, monkeypatch):
    """Nothing runs before the policy says so."""
    (tmp_path / "harmful.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(ModelError, match=r"runs Python code of yours(?s:.*)allow_code = true"):
        export("python:harmful:tokens", tmp_path / "onnx", data=tokens)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        pytest.param("nonsense", r"returned \(str\); return an nn\.Module", id="result"),
        pytest.param("broken", r"failed: OSError: no weights here", id="failure"),
        pytest.param("absent", r"cannot be imported: .*absent", id="name"),
        pytest.param("branching", r"cannot become ONNX.*\n.*torch\.export can trace", id="trace"),
    ],
)
def test_what_cannot_be_used_is_named(export, samples, tmp_path, function, message):
    """A wrong result, a failure, a wrong name and an untraceable module differ."""
    with pytest.raises(ModelError, match=message):
        export(f"python:toy_models:{function}", tmp_path, data=samples, allow_code=True)
