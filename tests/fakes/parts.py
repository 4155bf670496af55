"""One kind of device's part of a qualification, with an engine of a few bytes in a workspace."""

from enginegate.candidate import Engine, FileDigest, PrecisionProof, TensorSpec
from enginegate.content_store import ContentFolder
from enginegate.devices import DeviceQualification, PartIdentity, PartStore, stored_engine
from enginegate.evidence import DeviceEvidence
from enginegate.records import sha256_bytes
from tests.fakes.evidence import INT8, WHEN, benchmark, scorecard, sha, verdict


def part(
    workspace,
    device="l4",
    *,
    content=b"a plan for an L4",
    build_s=1.0,
    answers=b"golden answers",
    **identity,
):
    """A part that is kept, with its engine and golden answers."""
    folder = workspace.engines / sha("d")
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(content)
    spec = TensorSpec(name="x", dtype="float32", shape=(-1, 4))
    proof = PrecisionProof(
        weighted_layers={}, quantised_layers=0, device="CPU", proven=True, detail="int8"
    )
    engine = Engine(
        candidate=INT8,
        filename="model.onnx",
        file=FileDigest.of(folder / "model.onnx"),
        onnx_sha256=sha("0"),
        converted_sha256=sha("1"),
        converter="none",
        calibration_sha256=None,
        builder="onnxruntime 1",
        target="cpu",
        inputs=(spec,),
        outputs=(spec,),
        max_batch_size=8,
        build_s=build_s,
        proof=proof,
    )
    (folder / "manifest.json").write_bytes(engine.pretty_json())
    card = scorecard()
    store, digest = PartStore(workspace), engine.file.sha256
    asked = PartIdentity(
        **{
            "device": device,
            "model": card.model,
            "model_uri": card.model_uri,
            "policy_sha256": card.policy_sha256,
            "onnx_sha256": card.onnx_sha256,
            "evaluation_sha256": card.data.evaluation,
            "calibration_sha256": card.data.calibration,
        }
        | identity
    )
    given = FileDigest(sha256=sha256_bytes(answers), size_bytes=len(answers))
    golden = store.golden_file(given)
    golden.parent.mkdir(parents=True, exist_ok=True)
    golden.write_bytes(answers)
    judged = verdict().model_copy(update={"engine_sha256": digest})
    measured = benchmark().model_copy(update={"engine_sha256": digest})
    made = DeviceQualification(
        identity=asked,
        data=card.data,
        evidence=DeviceEvidence(
            device=device,
            environment={"gpu": "NVIDIA L4"},
            verdicts=(judged,),
            benchmarks=(measured,),
            winner=INT8,
            reason=card.reason,
            golden={INT8.name: given},
        ),
        engines={INT8.name: stored_engine(ContentFolder(engine, folder, reused=False))},
        made_at=WHEN,
        made_by="ada@gpu-host",
    )
    store.save(made)
    return made
