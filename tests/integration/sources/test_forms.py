"""Every other form of a source becomes ONNX, or is refused with the reason."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest

from enginegate.candidate import Candidate
from enginegate.data import write_data
from enginegate.engines import build_engine, open_engine, open_onnx, plan_engine, serving
from enginegate.errors import DataError, ModelError, TamperedError
from enginegate.model_source import ModelSource
from enginegate.policy import read_policy
from enginegate.sources import huggingface, read_onnx_model

pytestmark = pytest.mark.xdist_group("sources")
ROOT = Path(__file__).parents[3]

# Trees hold indices that are used unchecked, so skops does not trust them by itself.
TREES = {"skops_trusted_types": ["sklearn.tree._tree.Tree"]}

EXPORT_ALL = """
import json, sys
from pathlib import Path
from enginegate.data import read_data
from enginegate.engines import open_onnx
from enginegate.model_source import ModelSource
from enginegate.sources import onnx_from_source

root, tracking_uri, jobs = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
sys.path.insert(0, sys.argv[4])
for uri, data in jobs:
    kept = onnx_from_source(
        ModelSource(uri=uri, allow_code=True), read_data(root / data),
        onnx_root=root / "onnx", tracking_uri=tracking_uri, open_onnx=open_onnx,
        one_file_bytes=2**30,
    )
    print(kept.reused, kept.value.file.sha256)
"""


def classifier(rows, kind="logistic"):
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    made = {
        "logistic": make_pipeline(StandardScaler(), LogisticRegression()),
        "forest": RandomForestClassifier(10, random_state=0),
    }[kind]
    return made.fit(rows.inputs["features"], rows.labels)


def program(path, tokens, *, largest=512):
    """A torch.export program with dynamic batch and sequence."""
    import torch

    class Tokens(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = torch.nn.Embedding(64, 8), torch.nn.Linear(8, 3)

        def forward(self, input_ids, attention_mask):
            states = self.embed(input_ids) * attention_mask.unsqueeze(-1)
            return {"logits": self.head(states.sum(1))}

    batch, sequence = torch.export.Dim("batch"), torch.export.Dim("sequence", max=largest)
    examples = tuple(torch.from_numpy(tokens.inputs[n][:3, :largest]) for n in tokens.inputs)
    shapes = ({0: batch, 1: sequence},) * 2
    torch.export.save(torch.export.export(Tokens(), examples, dynamic_shapes=shapes), path)
    return path


def with_data_beside(model, folder):
    folder.mkdir()
    onnx.save(model, folder / "net.onnx", save_as_external_data=True, size_threshold=0)
    return folder / "net.onnx"


def set_weight(path, value):
    """Overwrite the first number of the largest weight in the file beside a model."""
    graph = onnx.load(path, load_external_data=False).graph
    tensor = max(graph.initializer, key=lambda tensor: int(np.prod(tensor.dims)))
    place = {entry.key: entry.value for entry in tensor.external_data}
    with (path.parent / place["location"]).open("r+b") as file:
        file.seek(int(place["offset"]))
        file.write(np.float32(value).tobytes())


class TestFiles:
    def test_onnx_with_weights_beside_it(self, cnn, export, fp32_onnx, tmp_path):
        """A file with external weights gives the bytes that the registered program gave."""
        path = with_data_beside(fp32_onnx, tmp_path / "model")

        found = export(f"file:{path}", tmp_path / "onnx").value

        assert len(list(path.parent.iterdir())) == 2
        assert found.file == cnn.value.file
        assert (found.parity_max_abs_error, found.source) == (None, f"file:{path}")

    def test_weights_are_part_of_the_digest(self, export, fp32_onnx, tmp_path):
        """Other bytes in the data file are another source, though the .onnx file is the same."""
        path = with_data_beside(fp32_onnx, tmp_path / "model")
        first = export(f"file:{path}", tmp_path / "onnx")
        set_weight(path, 2.5)

        second = export(f"file:{path}", tmp_path / "onnx")

        assert not second.reused
        assert second.value.source_sha256 != first.value.source_sha256

    def test_program_keeps_its_dynamic_sequence(self, export, tokens, tmp_path):
        """A .pt2 file keeps names and open axes; each length is compared with the framework."""
        path = program(tmp_path / "model.pt2", tokens)

        found = export(f"file:{path}", tmp_path / "onnx", data=tokens).value

        assert [str(spec) for spec in found.inputs] == [
            "input_ids: int64[any x any]",
            "attention_mask: int64[any x any]",
        ]
        assert [str(spec) for spec in found.outputs] == ["logits: float32[any x 3]"]
        assert found.proven_lengths == {"input_ids_1": (1, 6, 11, 12)}
        assert found.parity_max_abs_error <= 1e-5

    def test_program_with_a_hidden_pickle_is_refused(self, export, tokens, tmp_path):
        """A .pt2 archive that was given a pickle is not opened."""
        path = program(tmp_path / "model.pt2", tokens)
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("model/data/constants/evil", pickle.dumps(os.getcwd))

        with pytest.raises(ModelError, match=r"model\.pt2 cannot be opened.*evil"):
            export(f"file:{path}", tmp_path / "onnx", data=tokens)

    def test_data_longer_than_the_program_was_made_for_is_refused(self, export, tokens, tmp_path):
        """A bound of the program's own is kept, and named."""
        path = program(tmp_path / "model.pt2", tokens, largest=8)

        with pytest.raises((DataError, ModelError), match="8"):
            export(f"file:{path}", tmp_path / "onnx", data=tokens.head(4))

    def test_file_that_is_not_there_is_named(self, export, tmp_path):
        """The message has the whole path."""
        with pytest.raises(ModelError, match=r"there is no file .*nothing\.onnx"):
            export(f"file:{tmp_path}/nothing.onnx", tmp_path / "onnx")


class TestLargeModels:
    """More than one ONNX file may hold, shown with a lowered limit."""

    def test_weights_go_beside_the_file(self, cnn, export, fp32_onnx, samples, tmp_path):
        """The store keeps them in a second file, and the model answers as before."""
        path = with_data_beside(fp32_onnx, tmp_path / "model")

        large = export(f"file:{path}", tmp_path / "onnx", one_file_bytes=500)

        assert set(large.value.external) == {"model.onnx.data"}
        assert (large.folder / "model.onnx").stat().st_size < cnn.value.file.size_bytes
        with (
            open_onnx(cnn.folder / "model.onnx") as small,
            open_onnx(large.folder / "model.onnx") as model,
        ):
            np.testing.assert_array_equal(
                model.run(dict(samples.inputs))["output"], small.run(dict(samples.inputs))["output"]
            )

    def test_digest_of_the_file_stands_for_the_weights(self, export, fp32_onnx, tmp_path):
        """The .onnx file names the sha256 of its data, so other weights are another digest."""
        path = with_data_beside(fp32_onnx, tmp_path / "model")
        large = export(f"file:{path}", tmp_path / "onnx", one_file_bytes=500)
        notes = onnx.load(large.folder / "model.onnx", load_external_data=False).metadata_props

        assert {note.value for note in notes} == {large.value.external["model.onnx.data"].sha256}

    def test_changed_weights_are_noticed(self, export, fp32_onnx, tmp_path):
        """The data file is checked wherever the model is opened."""
        path = with_data_beside(fp32_onnx, tmp_path / "model")
        large = export(f"file:{path}", tmp_path / "onnx", one_file_bytes=500)
        data = large.folder / "model.onnx.data"
        data.write_bytes(data.read_bytes()[:-1] + b"x")

        with pytest.raises(TamperedError, match=r"model\.onnx\.data is not the file"):
            read_onnx_model(large.folder)

    def test_nan_in_them_is_found(self, export, fp32_onnx, tmp_path):
        """Weights that stay outside are checked like the others."""
        path = with_data_beside(fp32_onnx, tmp_path / "model")
        set_weight(path, np.nan)

        with pytest.raises(ModelError, match=r"holds 1 NaN or Inf"):
            export(f"file:{path}", tmp_path / "onnx", one_file_bytes=500)

    def test_engine_keeps_them_beside_it(self, export, fp32_onnx, samples, tmp_path):
        """An FP32 engine has its own copy, serves it, and notices a change; int8 holds its own."""
        path = with_data_beside(fp32_onnx, tmp_path / "model")
        large = export(f"file:{path}", tmp_path / "onnx", one_file_bytes=500)
        policy = read_policy(ROOT / "policies" / "digits.toml")
        plans = [
            plan_engine(large, Candidate.parse(name), policy=policy, calibration=samples)
            for name in ("onnxruntime-fp32", "onnxruntime-int8")
        ]

        exact, quantised = (build_engine(plan, tmp_path / "engines") for plan in plans)

        assert set(serving(exact.value, exact.folder).files) >= {"model.onnx", "model.onnx.data"}
        assert (set(exact.value.external), quantised.value.external) == ({"model.onnx.data"}, {})
        with open_engine(exact.value, exact.folder) as engine:
            assert engine.run(dict(samples.inputs))["output"].shape == (64, 10)
        (exact.folder / "model.onnx.data").write_bytes(b"other")
        with pytest.raises(TamperedError, match=r"model\.onnx\.data"):
            serving(exact.value, exact.folder)


class TestRuns:
    def test_model_of_a_run(self, registry, export, fp32_onnx, cnn, tmp_path):
        """A model that was logged and never registered is found by run and name."""
        uri = registry.log_in_run(
            "onnx", fp32_onnx, name="unregistered", save_as_external_data=False
        )

        assert export(uri, tmp_path).value.file == cnn.value.file

    @pytest.mark.parametrize("run", ["0" * 32, "RUN"])
    def test_what_is_not_there_is_named(self, registry, export, fp32_onnx, tmp_path, run):
        """No such run, or nothing of that name in it."""
        uri = registry.log_in_run("onnx", fp32_onnx, name="known", save_as_external_data=False)
        wanted = uri.replace("known", "unknown").replace(
            *(("RUN", "") if run == "RUN" else (uri[6:38], run))
        )

        with pytest.raises(ModelError, match=r"runs:/\w+/unknown"):
            export(wanted, tmp_path)


class TestSklearn:
    @pytest.mark.parametrize(
        ("kind", "logged", "allowed"),
        [
            pytest.param("logistic", {}, {}, id="safe"),
            pytest.param("forest", TREES, {"allow_pickle": True}, id="trees"),
        ],
    )
    def test_classifier_gives_logits(  # noqa: PLR0913
        self, registry, export, rows, tmp_path, kind, logged, allowed
    ):
        """The softmax of the ONNX output is scikit-learn's predict_proba."""
        model = classifier(rows, kind)
        uri = registry.log("sklearn", model, name=kind, **logged)

        kept = export(uri, tmp_path, data=rows, **allowed)

        assert [str(spec) for spec in kept.value.inputs] == ["features: float32[any x 5]"]
        assert [str(spec) for spec in kept.value.outputs] == ["logits: float32[any x 3]"]
        assert kept.value.parity_samples == 60
        with open_onnx(kept.folder / "model.onnx") as opened:
            logits = opened.run(dict(rows.inputs))["logits"]
        softmax = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        np.testing.assert_allclose(softmax, model.predict_proba(rows.inputs["features"]), atol=1e-5)

    def test_pickle_needs_permission(self, registry, export, rows, tmp_path):
        """cloudpickle runs code; with allow_pickle it exports like skops."""
        model = classifier(rows)
        pickled = registry.log(
            "sklearn", model, name="pickled-sk", serialization_format="cloudpickle"
        )
        safe = registry.log("sklearn", model, name="safe-sk")

        with pytest.raises(
            ModelError, match=r"model\.pkl is a pickle.*\n.*skops.*\n.*allow_pickle"
        ):
            export(pickled, tmp_path, data=rows)

        allowed = export(pickled, tmp_path, data=rows, allow_pickle=True)
        assert allowed.value.file == export(safe, tmp_path, data=rows).value.file

    def test_types_that_the_model_asks_to_trust_are_not_trusted(
        self, registry, export, rows, tmp_path
    ):
        """A skops file may name its own trusted types in MLflow's notes; they are not believed."""
        uri = registry.log("sklearn", classifier(rows, "forest"), name="smuggler", **TREES)

        with pytest.raises(
            ModelError, match=r"cannot be opened.*_tree\.Tree(?s:.*)allow_pickle = true"
        ):
            export(uri, tmp_path, data=rows)

    def test_data_that_does_not_fit_is_refused(self, registry, export, rows, samples, tmp_path):
        """The message has the number of features."""
        uri = registry.log("sklearn", classifier(rows), name="misfit")

        with pytest.raises(DataError, match=r"eval\.npz holds .*takes one input, float32\(5,\)"):
            export(uri, tmp_path, data=samples)

    def test_step_without_onnx_form_is_named(self, registry, export, rows, tmp_path):
        """A step that skl2onnx does not know is an error with its name."""
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import FunctionTransformer

        model = make_pipeline(FunctionTransformer(np.log1p), LogisticRegression())
        model.fit(abs(rows.inputs["features"]), rows.labels)
        uri = registry.log("sklearn", model, name="odd", serialization_format="cloudpickle")

        with pytest.raises(ModelError, match=r"odd/1 cannot become ONNX.*FunctionTransformer"):
            export(uri, tmp_path, data=rows, allow_pickle=True)


@pytest.mark.usefixtures("importable")
class TestCallables:
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
    def test_what_cannot_be_used_is_named(self, export, samples, tmp_path, function, message):
        """A wrong result, a failure, a wrong name and an untraceable module differ."""
        with pytest.raises(ModelError, match=message):
            export(f"python:toy_models:{function}", tmp_path, data=samples, allow_code=True)


class TestEncoders:
    def test_classifier(self, export, encoders, tokens, store):
        """A BERT classifier has free batch and sequence, and answers like transformers."""
        found = export(f"hf:{encoders}/classifier", store / "onnx", data=tokens).value

        assert [str(spec) for spec in found.outputs] == ["logits: float32[any x 3]"]
        assert [spec.shape for spec in found.inputs] == [(-1, -1), (-1, -1)]
        assert found.proven_lengths == {"sequence": (1, 6, 11, 12)}
        assert found.proven_batch_sizes == (1, 2, 7)
        assert found.parity_max_abs_error <= 1e-5

    def test_embedding_does_not_see_the_padding(self, export, encoders, tokens, store):
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

    def test_pooling_of_the_folder_is_used(self, encoders, tmp_path):
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
        vector = huggingface._pooled(states, torch.ones(1, 2, dtype=torch.long), read.pooling)

        np.testing.assert_allclose(vector.numpy(), [[0.6, 0.8]], atol=1e-6)
        assert folder / "1_Pooling" / "config.json" in read.files(code=False)

    def test_pickled_weights_need_permission(self, export, encoders, tokens, tmp_path):
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
                {"architectures": ["GPT2LMHeadModel"]}, "is GPT2LMHeadModel", id="decoder"
            ),
            pytest.param(
                {"num_labels": 3, "num_hidden_layers": 3}, "lacks 16 weights", id="missing"
            ),
        ],
    )
    def test_folder_that_cannot_be_used_is_refused(
        self, export, encoders, tokens, tmp_path, change, message
    ):
        """Code of the folder, another kind of model, and weights that would be random."""
        folder = tmp_path / "changed"
        shutil.copytree(encoders / "classifier", folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | change))

        with pytest.raises(ModelError, match=message):
            export(f"hf:{folder}", tmp_path / "onnx", data=tokens)

    def test_token_outside_the_vocabulary_is_named(self, export, encoders, tokens, tmp_path):
        """Data of another tokenizer fails with the source's name, not inside the framework."""
        wrong = {n: a + 100 if n == "input_ids" else a for n, a in tokens.inputs.items()}
        data = type(tokens)("other.npz", wrong, None, tokens.ids, {})

        with pytest.raises(ModelError, match=r"classifier.*IndexError"):
            export(f"hf:{encoders}/classifier", tmp_path, data=data)

    def test_folder_that_is_not_there_says_how_to_get_it(self, export, tokens, tmp_path):
        """Names on the hub are not downloaded."""
        with pytest.raises(ModelError, match=r"is not a model folder(?s:.*)hf download"):
            export("hf:sentence-transformers/all-MiniLM-L6-v2", tmp_path, data=tokens)


def test_signature_leaves_axes_open(registry, export, callables, tokens, monkeypatch, tmp_path):
    """A pickled module says nothing about its axes; the -1 of its signature do."""
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    monkeypatch.syspath_prepend(str(callables))
    import toy_models

    whole, real = np.dtype(np.int64), np.dtype(np.float32)
    signature = ModelSignature(
        inputs=Schema([TensorSpec(whole, (-1, -1), name) for name in tokens.inputs]),
        outputs=Schema([TensorSpec(real, (-1, 3), "ignored")]),
    )
    uri = registry.log(
        "pytorch",
        toy_models.Tokens(),
        name="open-axes",
        serialization_format="pickle",
        signature=signature,
    )

    found = export(uri, tmp_path, data=tokens, allow_pickle=True).value

    assert found.proven_lengths == {"dim1": (1, 6, 11, 12)}
    assert [spec.name for spec in found.outputs] == ["logits"]


def test_signature_names_the_output(registry, export, network, samples, tmp_path):
    """The name that a program's signature gives its output is the ONNX output's name."""
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    real = np.dtype(np.float32)
    signature = ModelSignature(
        inputs=Schema([TensorSpec(real, (-1, 1, 8, 8), "image")]),
        outputs=Schema([TensorSpec(real, (-1, 10), "logits")]),
    )
    uri = registry.log(
        "pytorch",
        network,
        name="named",
        input_example=(samples.inputs["image"][:4],),
        serialization_format="pt2",
        signature=signature,
    )

    assert [spec.name for spec in export(uri, tmp_path).value.outputs] == ["logits"]


@pytest.mark.usefixtures("importable")
def test_every_form_has_the_same_digest_in_another_process(  # noqa: PLR0913
    registry, export, encoders, callables, samples, tokens, rows, store, tmp_path
):
    """Hash seed, process and folder decide nothing, whatever the form; and nothing is printed."""
    jobs = [
        ("models:/cnn/1", samples),
        (f"file:{program(tmp_path / 'model.pt2', tokens)}", tokens),
        (f"hf:{encoders}/classifier", tokens),
        ("python:toy_models:tokens", tokens),
        (registry.log("sklearn", classifier(rows), name="again"), rows),
    ]
    here = [export(uri, store / "onnx", data=data, allow_code=True).value for uri, data in jobs]
    for data in (samples, tokens, rows):
        write_data(data, tmp_path / data.origin)
    named = json.dumps([(uri, data.origin) for uri, data in jobs])

    said = subprocess.run(
        [sys.executable, "-c", EXPORT_ALL, tmp_path, registry.tracking_uri, named, callables],
        env=os.environ | {"PYTHONHASHSEED": "4711", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )

    assert said.stdout.split() == [word for onnx in here for word in ("False", onnx.file.sha256)]
    assert said.stderr == ""
