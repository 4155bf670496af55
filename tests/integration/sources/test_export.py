"""ONNX files and torch.export programs become ONNX in the store, or are refused."""

import os
import pickle
import zipfile

import pytest

from enginegate.errors import DataError, ModelError

pytestmark = pytest.mark.xdist_group("sources")


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
