"""Folders of Hugging Face encoders become ONNX with free batch and sequence, or are refused."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from enginegate.candidate import Candidate
from enginegate.engines import open_onnx
from enginegate.errors import ModelError
from enginegate.policy import CalibrationTable
from enginegate.policy.model_source import ModelSource
from enginegate.precision import convert
from enginegate.sources import huggingface

pytestmark = pytest.mark.xdist_group("sources")


def test_classifier(export, encoders, tokens, store):
    """A BERT classifier has free batch and sequence, and answers like transformers."""
    found = export(f"hf:{encoders}/classifier", store / "onnx", data=tokens).value

    assert [str(spec) for spec in found.outputs] == ["logits: float32[batch, 3]"]
    assert [spec.shape for spec in found.inputs] == [(-1, -1), (-1, -1)]
    assert found.proven_lengths == {"sequence": (1, 6, 11, 12)}
    assert found.proven_batch_sizes == (1, 2, 7)
    assert found.parity_max_abs_error <= 1e-5


def test_embedding_does_not_see_the_padding(export, encoders, tokens, store):
    """The mean is over attended tokens: cutting padding off changes nothing."""
    kept = export(f"hf:{encoders}/encoder", store / "onnx", data=tokens)
    lengths = tokens.inputs["attention_mask"].sum(1)
    row = int(lengths.argmin())

    with open_onnx(kept.folder / "model.onnx") as model:
        padded = model.run({n: a[[row]] for n, a in tokens.inputs.items()})["embedding"]
        cut = {n: a[[row], : lengths[row]] for n, a in tokens.inputs.items()}
        bare = model.run(cut)["embedding"]

    assert padded.shape == (1, 16)
    np.testing.assert_allclose(padded, bare, atol=1e-6)


def test_pooling_of_the_folder_is_used(encoders, tmp_path):
    """modules.json of sentence-transformers decides: here the first token, normalised."""
    import torch

    folder = tmp_path / "pooled"
    shutil.copytree(encoders / "encoder", folder)
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [{"path": path, "type": f"sentence_transformers.models.{k}"} for path, k in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))

    read = huggingface._read(ModelSource(uri=f"hf:{folder}"))
    states = torch.tensor([[[3.0, 4.0], [9.0, 9.0]]])
    model = lambda **_: SimpleNamespace(last_hidden_state=states)  # noqa: E731
    mask = torch.ones(1, 2, dtype=torch.long)
    vector = huggingface._encoder(model, read)(mask, mask)["embedding"]

    np.testing.assert_allclose(vector.numpy(), [[0.6, 0.8]], atol=1e-6)
    assert folder / "1_Pooling" / "config.json" in read.files(code=False)


def test_pickled_weights_need_permission(export, encoders, tokens, tmp_path):
    """pytorch_model.bin is a pickle; only safetensors open without permission."""
    folder = tmp_path / "pickled"
    shutil.copytree(encoders / "classifier", folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle(?s:.*)allow_pickle"):
        export(f"hf:{folder}", tmp_path / "onnx", data=tokens)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            {"auto_map": {"AutoModel": "code.Net"}}, "code.Net(?s:.*)allow_code", id="code"
        ),
        pytest.param(
            {"text_config": {"auto_map": {"AutoModel": "code.Net"}}},
            "code.Net(?s:.*)allow_code",
            id="nested-code",
        ),
        pytest.param(
            {"attn_implementation": "someone/attention:kernel"},
            "config.json sets attn_implementation to 'someone/attention:kernel'.*'eager' or 'sdpa'",
            id="kernel",
        ),
        pytest.param({"architectures": ["GPT2LMHeadModel"]}, "is GPT2LMHeadModel", id="decoder"),
        pytest.param({"num_labels": 3, "num_hidden_layers": 3}, "lacks 16 weights", id="missing"),
    ],
)
def test_folder_that_cannot_be_used_is_refused(export, encoders, tokens, tmp_path, change, message):
    """Code of the folder, another kind of model, and weights that would be random."""
    folder = tmp_path / "changed"
    shutil.copytree(encoders / "classifier", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))

    with pytest.raises(ModelError, match=message):
        export(f"hf:{folder}", tmp_path / "onnx", data=tokens)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        pytest.param(
            "adapter_config.json",
            {"base_model_name_or_path": "someone/base"},
            "adapter_config.json makes it an adapter",
            id="adapter",
        ),
        pytest.param(
            "model.safetensors.index.json",
            {"weight_map": {"w": "../other/model.safetensors"}},
            "names '../other/model.safetensors'",
            id="weights",
        ),
        pytest.param(
            "modules.json",
            [{"path": "../1_Pooling", "type": "sentence_transformers.models.Pooling"}],
            "modules.json file sets 0.path to '../1_Pooling'",
            id="pooling",
        ),
    ],
)
def test_files_of_another_folder_are_refused(  # noqa: PLR0913
    export, encoders, tokens, tmp_path, file, content, message
):
    """An adapter of a model that is elsewhere, and paths that lead out of the folder."""
    folder = tmp_path / "leading-out"
    shutil.copytree(encoders / "encoder", folder)
    (folder / file).write_text(json.dumps(content))

    with pytest.raises(ModelError, match=message):
        export(f"hf:{folder}", tmp_path / "onnx", data=tokens)


def test_transformers_stays_offline_while_opening(encoders, monkeypatch):
    """transformers is offline while it opens a folder, and as it was afterwards."""
    import huggingface_hub
    import transformers

    seen = []

    def ask(*_arguments, **_options):
        seen.append(huggingface_hub.is_offline_mode())
        raise OSError("not opened")

    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", ask)
    source = ModelSource(uri=f"hf:{encoders}/encoder")
    before = huggingface_hub.is_offline_mode()

    with pytest.raises(ModelError, match="OSError: not opened"):
        huggingface._load(huggingface._read(source), source)

    assert seen == [True]
    assert huggingface_hub.is_offline_mode() is before


def test_token_outside_the_vocabulary_is_named(export, encoders, tokens, tmp_path):
    """Data of another tokenizer fails with the source's name, not inside the framework."""
    wrong = {n: a + 100 if n == "input_ids" else a for n, a in tokens.inputs.items()}
    data = type(tokens)("other.npz", wrong, None, tokens.ids, {})

    with pytest.raises(ModelError, match=r"classifier.*IndexError"):
        export(f"hf:{encoders}/classifier", tmp_path, data=data)


def test_folder_that_is_not_there_says_how_to_get_it(export, tokens, tmp_path):
    """Names on the hub are not downloaded."""
    with pytest.raises(ModelError, match=r"is not a model folder(?s:.*)hf download"):
        export("hf:sentence-transformers/all-MiniLM-L6-v2", tmp_path, data=tokens)


def test_int8_of_an_encoder_leaves_nothing_behind(
    export, encoders, tokens, store, tmp_path, monkeypatch
):
    """Symbolic inference gives up on transformers' masks; INT8 is made without it."""
    path = export(f"hf:{encoders}/classifier", store / "onnx", data=tokens).folder / "model.onnx"
    monkeypatch.chdir(tmp_path)

    found = convert(
        path, Candidate.parse("onnxruntime-int8"), data=tokens, rules=CalibrationTable(method="max")
    )

    assert found.stats().layers["int8"] == found.stats().quantised > 10
    assert "without symbolic shapes (ONNX Runtime's inference does not follow" in found.converter
    assert list(tmp_path.iterdir()) == []
