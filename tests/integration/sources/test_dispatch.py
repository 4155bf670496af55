"""ONNX files, torch.export programs and functions become ONNX in the store, or are refused."""

import os
import pickle
import re
import zipfile
from pathlib import Path

import pytest

from enginegate.errors import DataError, ModelError

pytestmark = pytest.mark.xdist_group("sources")
ROOT = Path(__file__).parents[3]


def test_onnx_with_weights_beside_it(cnn, export, beside, tmp_path):
    """A file with external weights gives the bytes that the registered program gave."""
    found = export(f"file:{beside}", tmp_path / "onnx").value

    assert len(list(beside.parent.iterdir())) == 2
    assert found.file == cnn.value.file
    assert (found.parity_max_abs_error, found.source) == (None, f"file:{beside}")


def test_weights_are_part_of_the_digest(export, beside, set_weight, tmp_path):
    """Other bytes in the data file are another source, though the .onnx file is the same."""
    first = export(f"file:{beside}", tmp_path / "onnx")
    set_weight(2.5)

    second = export(f"file:{beside}", tmp_path / "onnx")

    assert not second.reused
    assert second.value.source_sha256 != first.value.source_sha256


def test_program_keeps_its_dynamic_sequence(program, export, tokens, tmp_path):
    """A .pt2 file keeps names and open axes; each length is compared with the framework."""
    path = program()

    found = export(f"file:{path}", tmp_path / "onnx", data=tokens).value

    assert [str(spec) for spec in found.inputs] == [
        "input_ids: int64[batch, any]",
        "attention_mask: int64[batch, any]",
    ]
    assert [str(spec) for spec in found.outputs] == ["logits: float32[batch, 3]"]
    assert found.proven_lengths == {"input_ids_1": (1, 6, 11, 12)}
    assert found.parity_max_abs_error <= 1e-5


def test_program_with_a_hidden_pickle_is_refused(program, export, tokens, tmp_path):
    """A .pt2 archive that was given a pickle is not opened."""
    path = program()
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("model/data/constants/evil", pickle.dumps(os.getcwd))

    with pytest.raises(ModelError, match=r"model\.pt2 cannot be opened.*evil"):
        export(f"file:{path}", tmp_path / "onnx", data=tokens)


def test_data_longer_than_the_program_was_made_for_is_refused(program, export, tokens, tmp_path):
    """A bound of the program's own is kept, and named."""
    path = program(largest=8)

    with pytest.raises(DataError, match=r"Guard failed: input_ids\.size\(\)\[1\] <= 8"):
        export(f"file:{path}", tmp_path / "onnx", data=tokens.head(4))


def test_file_that_is_not_there_is_named(export, tmp_path):
    """The message has the whole path."""
    with pytest.raises(ModelError, match=r"there is no file .*nothing\.onnx"):
        export(f"file:{tmp_path}/nothing.onnx", tmp_path / "onnx")


@pytest.mark.usefixtures("importable")
class TestCallable:
    """Functions that return a module become ONNX once the policy allows their code to run."""

    def test_module_with_examples_and_axes(self, export, tokens, tmp_path):
        """A function's module exports with the axes that the function names."""
        found = export("python:toy_models:tokens", tmp_path, data=tokens, allow_code=True).value

        assert [spec.shape for spec in found.inputs] == [(-1, -1), (-1, -1)]
        assert found.proven_lengths == {"sequence": (1, 6, 11, 12)}
        assert (found.parity_samples, found.outputs[0].name) == (16, "logits")

    def test_axis_with_bounds(self, export, samples, tmp_path):
        """Sizes below the bound are not asked of the model."""
        found = export("python:toy_models:bounded", tmp_path, data=samples, allow_code=True).value

        assert found.inputs[0].shape == (-1, 1, -1, 8)
        assert found.proven_lengths == {"height": (7, 8)}

    def test_function_on_the_page(self, export, tokens, tmp_path, monkeypatch):
        """The example in docs/sources.md works as it stands."""
        page = (ROOT / "docs" / "sources.md").read_text()
        block = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
        (tmp_path / "page_model.py").write_text(block)
        monkeypatch.syspath_prepend(str(tmp_path))
        ids = {"input_ids": tokens.inputs["input_ids"]}
        data = type(tokens)("ids.npz", ids, None, tokens.ids, {})

        found = export("python:page_model:make", tmp_path / "onnx", data=data, allow_code=True)

        assert found.value.proven_lengths == {"sequence": (1, 6, 11, 12)}

    def test_is_not_imported_without_permission(self, export, tokens, tmp_path, monkeypatch):
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
            pytest.param(
                "branching", r"cannot become ONNX.*\n.*torch\.export can trace", id="trace"
            ),
        ],
    )
    def test_unusable_function_is_named(self, export, samples, tmp_path, function, message):
        """A wrong result, a failure, a wrong name and an untraceable module differ."""
        with pytest.raises(ModelError, match=message):
            export(f"python:toy_models:{function}", tmp_path, data=samples, allow_code=True)
