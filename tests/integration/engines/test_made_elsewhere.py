"""Candidates that something else made: read without trust, built, proven, with provenance."""

import pickle
from zipfile import ZipFile

import numpy as np
import onnx
import pytest

from enginegate.candidate import FileDigest
from enginegate.engines import build_engine, open_engine
from enginegate.engines.made_elsewhere import MadeFile
from enginegate.errors import BuildError
from enginegate.policy.building import MadeElsewhere
from validation.verdict import verdict_on

pytestmark = pytest.mark.xdist_group("engines")


@pytest.fixture(scope="session")
def quantised(plan, store):
    """The CNN with Quantize/Dequantize pairs, as training with them leaves it."""
    built = build_engine(plan("onnxruntime-int8"), store / "engines")
    return built.folder / built.value.filename


def made(file, **changes):
    table = {"file": str(file), "precision": "int8", "name": "qat"} | changes
    return {"candidates": {"made": [table]}}


def test_onnx_with_pairs_of_training_is_a_candidate(quantised, plan, tmp_path, samples):
    """Its own bytes, without calibration data, proven int8; where it is from is told."""
    tables = made(quantised, made_by="QAT run 7")

    built = build_engine(plan("onnxruntime-int8+qat", data=None, **tables), tmp_path)

    engine = built.value
    assert engine.file == FileDigest.of(quantised)
    assert (engine.calibration_sha256, engine.proof.proven) == (None, True)
    assert engine.proof.weighted_layers == {"int8": 3}
    with open_engine(engine, built.folder) as runner:
        assert runner.run({"image": samples.inputs["image"]})["output"].shape == (64, 10)
    told = next(f for f in verdict_on(engine, ()).findings if f.gate == "provenance")
    assert (
        told.reason
        == f"made elsewhere, by QAT run 7: {quantised}, sha256 {engine.file.sha256[:12]}"
    )


@pytest.mark.rtx
def test_onnx_with_pairs_is_compiled_for_tensorrt_too(plan, tmp_path):
    """The kind says who runs it; the pairs decide the precision of each layer."""
    pytest.importorskip("tensorrt_rtx")
    (tmp_path / "qat.onnx").write_bytes(plan("tensorrt-int8").convert().onnx)
    tables = made(tmp_path / "qat.onnx", kind="tensorrt")

    engine = build_engine(plan("tensorrt-int8+qat", data=None, **tables), tmp_path / "e").value

    assert engine.proof.proven
    assert engine.converted_sha256 == engine.made.sha256
    assert engine.filename == "model.plan"


def test_name_that_is_not_true_is_a_failed_proof(cnn, plan, tmp_path):
    """An FP32 file is no int8 candidate, whatever the policy calls it."""
    tables = made(cnn.folder / "model.onnx")

    engine = build_engine(plan("onnxruntime-int8+qat", data=None, **tables), tmp_path).value

    assert not engine.proof.proven
    assert "No layer is quantised to int8" in engine.proof.detail


def test_other_bytes_than_the_policy_names_are_refused(quantised, plan):
    """Somebody qualifies the file that was agreed on, or another on purpose."""
    with pytest.raises(BuildError, match="is not the file that the policy names"):
        plan("onnxruntime-int8+qat", data=None, **made(quantised, sha256="0" * 64))


def test_missing_file_is_named(tmp_path, plan):
    with pytest.raises(BuildError, match=r"gone\.onnx cannot be read: No such file"):
        plan("onnxruntime-int8+qat", data=None, **made(tmp_path / "gone.onnx"))


def test_another_file_is_another_engine(quantised, cnn, plan):
    """What was judged of one says nothing about the other."""
    tables = [made(quantised), made(cnn.folder / "model.onnx")]

    assert len({plan("onnxruntime-int8+qat", data=None, **each).key for each in tables}) == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: setattr(m.graph.output[0], "name", "scores"), "Name its tensors alike"),
        (
            lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 10),
            "takes image: float16",
        ),
        (
            lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[0], "dim_value", 4),
            "Export it with the types and the dynamic axes",
        ),
    ],
)
def test_model_of_other_tensors_is_no_candidate(fp32_onnx, plan, tmp_path, change, said):
    """It could not take the requests that the live model gets."""
    change(fp32_onnx)
    onnx.save(fp32_onnx, tmp_path / "other.onnx")

    with pytest.raises(BuildError, match=said):
        build_engine(
            plan("onnxruntime-int8+qat", data=None, **made(tmp_path / "other.onnx")), tmp_path / "e"
        )


def test_weights_in_another_file_are_refused(fp32_onnx, plan, tmp_path):
    """The digest would not change with them, so that an engine of other weights was reused."""
    file = tmp_path / "in" / "model.onnx"
    file.parent.mkdir()
    onnx.save(fp32_onnx, file, save_as_external_data=True, location="weights.bin", size_threshold=0)
    changes = {"precision": "fp32", "sha256": FileDigest.of(file).sha256}

    with pytest.raises(
        BuildError, match=r"keeps weights in 'weights\.bin'.* save_as_external_data"
    ):
        build_engine(plan("onnxruntime-fp32+qat", data=None, **made(file, **changes)), tmp_path)

    onnx.save(onnx.load(file), file, save_as_external_data=False)
    mended = plan("onnxruntime-fp32+qat", data=None, **made(file, precision="fp32"))
    assert build_engine(mended, tmp_path / "e").value.file == FileDigest.of(file)


def test_weights_of_a_function_in_another_file_are_refused(fp32_onnx, plan, tmp_path):
    """Wherever a model keeps a constant, it may name a file for it."""
    constant = onnx.helper.make_tensor("value", onnx.TensorProto.FLOAT, [1], bytes(4), raw=True)
    onnx.external_data_helper.set_external_data(constant, "beside.bin")
    node = onnx.helper.make_node("Constant", [], ["y"], value=constant)
    opsets = [onnx.helper.make_opsetid("", 17)]
    fp32_onnx.functions.append(onnx.helper.make_function("own", "F", [], ["y"], [node], opsets))
    onnx.save_model(fp32_onnx, tmp_path / "model.onnx")
    tables = made(tmp_path / "model.onnx", precision="fp32")

    with pytest.raises(BuildError, match=r"keeps weights in 'beside\.bin'"):
        plan("onnxruntime-fp32+qat", data=None, **tables).convert()


@pytest.mark.parametrize("name", ["qat.onnx", "fast.pt2"])
def test_file_that_is_replaced_after_its_digest_was_read_is_refused(quantised, tmp_path, name):
    """Only the bytes that have the digest are opened: a package is native code."""
    file = tmp_path / name
    file.write_bytes(quantised.read_bytes())
    table = MadeElsewhere(
        file=file, precision="int8", allow_code=True, sha256=FileDigest.of(file).sha256
    )
    opened = MadeFile.open(table)
    file.write_bytes(b"other code")

    with pytest.raises(BuildError, match="was replaced meanwhile"):
        opened.copy_package(tmp_path / "copied")

    assert not (tmp_path / "copied").exists()


class _Bomb:
    def __reduce__(self):
        return print, ("the pickle was opened",)


def test_archive_of_aitune_is_read_without_its_pickle(quantised, plan, tmp_path, capsys):
    """Only the engine inside is taken, with the permissions that this one needs."""
    with ZipFile(tmp_path / "tuned.ait", "w") as archive:
        archive.writestr("state_dict.pt", pickle.dumps(_Bomb()))
        archive.write(quantised, "1_model.onnx")
    tables = made(tmp_path / "tuned.ait", kind="onnxruntime")

    engine = build_engine(plan("onnxruntime-int8+qat", data=None, **tables), tmp_path / "e").value

    assert engine.file == FileDigest.of(quantised)
    assert engine.made.sha256 == FileDigest.of(tmp_path / "tuned.ait").sha256
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("names", [(), ("1_a.onnx", "2_b.onnx")])
def test_archive_that_is_not_one_model_is_refused(quantised, plan, tmp_path, names):
    """AITune may tune parts of a model, and none of these is the model."""
    with ZipFile(tmp_path / "tuned.ait", "w") as archive:
        archive.writestr("state_dict.pt", b"")
        for name in names:
            archive.write(quantised, name)
    tables = made(tmp_path / "tuned.ait", kind="onnxruntime")

    with pytest.raises(BuildError, match=f"holds {len(names)} engines that end in .onnx"):
        build_engine(plan("onnxruntime-int8+qat", data=None, **tables), tmp_path / "e")


def test_noise_is_no_model(plan, tmp_path):
    (tmp_path / "noise.onnx").write_bytes(np.random.default_rng(0).bytes(1000))

    with pytest.raises(BuildError, match=r"not an ONNX file|holds no graph"):
        build_engine(
            plan("onnxruntime-int8+qat", data=None, **made(tmp_path / "noise.onnx")), tmp_path / "e"
        )
