"""Every way a candidate is known to go wrong is caught, on real engines; clean ones pass."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from enginegate.candidate import Candidate, FileDigest
from enginegate.engines.precision_check import check_precision_proof
from enginegate.evidence import Outcome
from enginegate.precision import graph_stats
from tests.fakes.judged import worst_slice

PASSED, INCONCLUSIVE, FAILED = Outcome.PASSED, Outcome.INCONCLUSIVE, Outcome.FAILED


@pytest.mark.parametrize("candidate", ["onnxruntime-fp32", "onnxruntime-int8"])
def test_clean_candidates_pass(lab, candidate):
    """FP32 itself and a well calibrated int8 engine pass every gate."""
    verdict = lab.judge(lab.engine(lab.graph, candidate))

    assert verdict.blocking == ()
    assert verdict.outcome is PASSED


def test_emulated_fp16_passes(lab):
    """Every tensor rounded to FP16 and back: the errors of a real FP16 engine, and it passes."""
    verdict = lab.judge(lab.engine(_rounded_to_fp16(lab.graph)))

    assert verdict.outcome is PASSED
    assert 50.0 < verdict.finding("sqnr", "evaluation").value < 100.0


@dataclass(frozen=True)
class Fault:
    """A way to break a graph, and the gate that must fail, on what."""

    breaks: Callable[[ModelProto], ModelProto]
    gate: str
    scope: str = "evaluation"


def _forget_class_three(graph):
    bias = _weights(graph, "logits.bias")
    bias[3] = -100.0
    return _with(graph, "logits.bias", bias)


def _swap_three_and_five(graph):
    for name in ("logits.weight", "logits.bias"):
        values = _weights(graph, name)
        values[..., [3, 5]] = values[..., [5, 3]]
        graph = _with(graph, name, values)
    return graph


def _scale_logits(graph):
    return _after(graph, "Mul", np.float32(3.0))


def _shift_preprocessing(graph):
    scale = numpy_helper.from_array(np.float32(255.0), "scale")
    graph.graph.initializer.append(scale)
    graph.graph.node[0].input[0] = "scaled"
    graph.graph.node.insert(0, helper.make_node("Mul", ["image", "scale"], ["scaled"]))
    return graph


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            Fault(_forget_class_three, "slice_accuracy_loss", "evaluation/digit=3"),
            id="one-broken-class",
        ),
        pytest.param(
            Fault(_swap_three_and_five, "slice_accuracy_loss", "evaluation/digit=5"),
            id="two-classes-swapped",
        ),
        pytest.param(Fault(_scale_logits, "sqnr"), id="scaled-logits"),
        pytest.param(Fault(_shift_preprocessing, "max_abs_error"), id="preprocessing-x255"),
    ],
)
def test_broken_graphs_fail(lab, fault):
    """The gate that exists for a fault fails, and says which limit would have let it through."""
    verdict = lab.judge(lab.engine(fault.breaks(lab.graph)))

    finding = verdict.finding(fault.gate, fault.scope)
    assert finding.outcome is FAILED
    assert finding.would_pass is not None
    assert verdict.outcome is FAILED


def test_broken_slice_of_two_per_cent(lab):
    """A camera that made 2 % of the data lost a third of its accuracy: only its slice shows it."""
    lenient = lab.gates.model_copy(update={"max_abs_error": 100.0, "min_sqnr_db": -100.0})

    verdict = lab.judge(lab.engine(_marked(lab.graph, "flip")), lenient)

    whole = [f for f in verdict.findings if f.scope == "evaluation" and not f.advisory]
    assert {finding.outcome for finding in whole} == {PASSED}
    harmed = worst_slice(verdict.findings)
    assert (harmed.scope, harmed.outcome) == ("evaluation/camera=new", FAILED)
    assert [f.scope for f in verdict.blocking] == ["evaluation/camera=new"]


@pytest.mark.parametrize("candidate", ["onnxruntime-fp32", "onnxruntime-int8"])
@pytest.mark.parametrize("sliced", [True, False], ids=["sliced-by-class", "without-slices"])
def test_mislabelled_class_is_no_evidence(lab, tmp_path, candidate, sliced):
    """All of class 3 labelled 5: FP32 is wrong on each of them, so no candidate could be worse."""
    wrong = np.where(lab.data.labels == 3, 5, lab.data.labels)
    slices = lab.data.slices if sliced else {}
    data = replace(lab.data, labels=wrong, slices=slices)
    spoilt = replace(lab, root=tmp_path, data=data)

    verdict = spoilt.judge(lab.engine(lab.graph, candidate))

    assert verdict.outcome is INCONCLUSIVE
    named = {f"{finding.gate} on {finding.scope}": finding for finding in verdict.blocking}
    whole = named.pop("accuracy_loss on evaluation")
    assert "that it calls 3; they are mostly labelled 5" in whole.reason
    assert set(named) == ({"slice_accuracy_loss on evaluation/digit=3"} if sliced else set())
    for finding in named.values():
        assert "no candidate can be worse than is allowed" in finding.reason
        assert "Look at the labels of this slice" in finding.remedy


def test_permuted_labels_are_no_evidence(lab, tmp_path):
    """Labels in another order than the samples: FP32 itself is at chance, and that is said."""
    mixed = np.random.default_rng(0).permutation(lab.data.labels)
    data = replace(lab.data, labels=mixed, slices={})
    spoilt = replace(lab, root=tmp_path, data=data)

    verdict = spoilt.judge(lab.engine(lab.graph))

    (blocking,) = verdict.blocking
    assert blocking.gate == "accuracy_loss"
    assert blocking.reason.startswith("FP32 itself scores ")
    assert "labels or outputs are probably permuted" in blocking.reason


def test_single_nan_in_ten_thousand_fails(lab):
    """One sample of 10,000 that gives NaN fails, though every average is fine."""
    once = lab.data.inputs["image"].copy()
    once[1:, 0, 7, 7] = 0.0
    data = replace(lab.data, inputs={"image": once})

    verdict = replace(lab, data=data, root=lab.root / "nan").judge(
        lab.engine(_marked(lab.graph, "nan"))
    )

    assert verdict.finding("nonfinite", "evaluation").value == 1.0
    assert verdict.finding("nonfinite", "evaluation").outcome is FAILED
    assert verdict.finding("accuracy_loss", "evaluation").outcome is PASSED


def test_swapped_outputs(two_heads):
    """Two heads in the wrong order are caught in both outputs' own findings."""
    graph = two_heads.graph
    for node in graph.graph.node:
        node.output[:] = [{"left": "right", "right": "left"}.get(n, n) for n in node.output]

    verdict = two_heads.judge(two_heads.engine(graph))
    clean = two_heads.judge(two_heads.engine(two_heads.graph))

    assert clean.finding("top1_agreement", "evaluation:right").outcome is PASSED
    for head in ("left", "right"):
        assert verdict.finding("top1_agreement", f"evaluation:{head}").outcome is FAILED


def test_saturated_int8_layer(lab):
    """An activation scale eight times too small cuts off most of a layer's range."""
    sound = lab.engine(lab.graph, "onnxruntime-int8")

    verdict = lab.judge(_edited(lab, sound, _saturate))

    assert verdict.finding("sqnr", "evaluation").outcome is FAILED
    assert verdict.finding("precision_proof", "engine").outcome is PASSED


def test_stale_calibration(lab):
    """Scales from images a tenth as bright, as from last winter, do not fit today's."""
    dim = replace(
        lab.calibration, inputs={"image": lab.calibration.inputs["image"] * np.float32(0.1)}
    )

    verdict = lab.judge(lab.engine(lab.graph, "onnxruntime-int8", calibration=dim))

    assert verdict.outcome is FAILED
    assert verdict.finding("kl_p99", "evaluation").outcome is FAILED


def test_another_precision_than_claimed(lab):
    """An "int8" engine that computes in FP32 answers perfectly, and fails for what it is not."""
    fp32 = lab.engine(lab.graph)
    claimed = Candidate.parse("onnxruntime-int8")
    proof = check_precision_proof(claimed, graph_stats(lab.graph), device="CPUExecutionProvider")
    liar = replace(fp32, value=fp32.value.model_copy(update={"candidate": claimed, "proof": proof}))

    verdict = lab.judge(liar)

    assert [finding.gate for finding in verdict.blocking] == ["precision_proof"]
    assert verdict.outcome is FAILED


def _weights(graph, name):
    tensor = next(each for each in graph.graph.initializer if each.name == name)
    return numpy_helper.to_array(tensor).copy()


def _with(graph, name, values):
    tensor = next(each for each in graph.graph.initializer if each.name == name)
    tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float32), name))
    return graph


def _after(graph, kind, *constants):
    """One more node between the last layer and the output ``logits``."""
    last = next(node for node in graph.graph.node if "logits" in node.output)
    last.output[:] = ["plain"]
    names = [f"after.{number}" for number, _ in enumerate(constants)]
    graph.graph.initializer.extend(map(numpy_helper.from_array, constants, names))
    graph.graph.node.append(helper.make_node(kind, ["plain", *names], ["logits"]))
    return graph


def _marked(graph, how):
    """Answers go wrong where the mark, the last pixel, is 1: turned round, or NaN."""
    last = next(node for node in graph.graph.node if "logits" in node.output)
    last.output[:] = ["plain"]
    constants = {
        "from": np.array([7, 7]),
        "to": np.array([8, 8]),
        "axes": np.array([2, 3]),
        "row": np.array([-1, 1]),
        "half": np.float32(0.5),
    }
    graph.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in constants.items())
    turn = [
        helper.make_node("Slice", ["image", "from", "to", "axes"], ["pixel"]),
        helper.make_node("Reshape", ["pixel", "row"], ["mark"]),
        helper.make_node("Sub", ["half", "mark"], ["sign"]),
    ]
    if how == "nan":
        turn.append(helper.make_node("Sqrt", ["sign"], ["root"]))
        turn.append(helper.make_node("Div", ["root", "root"], ["factor"]))
    else:
        turn.append(helper.make_node("Div", ["sign", "half"], ["factor"]))
    turn.append(helper.make_node("Mul", ["plain", "factor"], ["logits"]))
    graph.graph.node.extend(turn)
    return graph


def _rounded_to_fp16(graph):
    """A pair of casts behind every node; weights rounded once."""
    for tensor in graph.graph.initializer:
        rounded = numpy_helper.to_array(tensor).astype(np.float16).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(rounded, tensor.name))
    nodes = []
    for node in graph.graph.node:
        name = node.output[0]
        node.output[:] = [f"{name}.exact"]
        down = helper.make_node("Cast", [f"{name}.exact"], [f"{name}.half"], to=TensorProto.FLOAT16)
        back = helper.make_node("Cast", [f"{name}.half"], [name], to=TensorProto.FLOAT)
        nodes += [node, down, back]
    del graph.graph.node[:]
    graph.graph.node.extend(nodes)
    return graph


def _saturate(graph):
    """The scale of the second convolution's input, divided by eight."""
    scale = next(t for t in graph.graph.initializer if re.fullmatch(r"r1.*scale", t.name))
    values = numpy_helper.to_array(scale) / np.float32(8.0)
    scale.CopyFrom(numpy_helper.from_array(values.astype(np.float32), scale.name))
    return graph


def _edited(lab, engine, change):
    """An engine whose file was changed and recorded again, as if it had been built so."""
    folder = lab.root / "edited" / change.__name__
    folder.mkdir(parents=True)
    graph = change(onnx.load(engine.folder / engine.value.filename))
    onnx.save(graph, folder / engine.value.filename)
    file = FileDigest.of(folder / engine.value.filename)
    return replace(engine, folder=folder, value=engine.value.model_copy(update={"file": file}))
