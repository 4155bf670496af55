"""Data sets, limits and comparisons with known answers."""

from collections.abc import Callable

import numpy as np
import pytest

from enginegate.candidate import (
    Candidate,
    Engine,
    FileDigest,
    Precision,
    PrecisionProof,
    TensorSpec,
)
from enginegate.data import DataSet
from enginegate.policy import Gates
from validation.agreement import OutputComparison


@pytest.fixture
def gates() -> Gates:
    return Gates(
        confidence=0.95,
        min_samples=400,
        max_accuracy_loss=0.02,
        min_slice_samples=40,
        max_slice_accuracy_loss=0.10,
        min_top1_agreement=0.97,
        max_kl_p99_nats=0.05,
        max_abs_error=1.0,
    )


@pytest.fixture
def data_of() -> Callable[..., DataSet]:
    """Make a data set of so many samples, with labels and slices if given."""

    def make(samples, labels=None, **slices):
        return DataSet(
            origin="eval.npz",
            inputs={"image": np.zeros((samples, 1), np.float32)},
            labels=None if labels is None else np.asarray(labels, np.int64),
            ids=np.array([f"s{row}" for row in range(samples)], dtype=np.str_),
            slices={name: np.asarray(column, np.str_) for name, column in slices.items()},
        )

    return make


@pytest.fixture
def comparison_of() -> Callable[..., OutputComparison]:
    """Make a comparison from which samples were lost, with slices if given."""

    def make(lost, *, scope="evaluation", labelled=True, **slices):
        lost = np.asarray(lost, dtype=bool)
        right = np.ones(len(lost), dtype=bool)
        return OutputComparison(
            scope=scope,
            ids=np.array([f"s{row}" for row in range(len(lost))], dtype=np.str_),
            slices={name: np.asarray(column, np.str_) for name, column in slices.items()},
            top1_reference=np.ones(len(lost), np.int64),
            top1_candidate=np.where(lost, 0, 1),
            correct_reference=right if labelled else None,
            correct_candidate=~lost if labelled else None,
            kl_nats=np.where(lost, 1.0, 1e-4),
            max_abs_error=np.full(len(lost), 0.1),
            nonfinite=np.zeros(len(lost), dtype=bool),
        )

    return make


@pytest.fixture
def engine() -> Engine:
    spec = TensorSpec(name="image", dtype="float32", shape=(-1, 1, 8, 8))
    return Engine(
        candidate=Candidate(kind="onnxruntime", precision=Precision.INT8),
        filename="model.onnx",
        file=FileDigest(sha256="a" * 64, size_bytes=1),
        onnx_sha256="b" * 64,
        converted_sha256="c" * 64,
        converter="onnxruntime 1.26",
        calibration_sha256="d" * 64,
        builder="onnxruntime 1.26",
        target="cpu",
        inputs=(spec,),
        outputs=(spec.model_copy(update={"name": "logits", "shape": (-1, 10)}),),
        max_batch_size=32,
        build_s=1.0,
        proof=PrecisionProof(
            weighted_layers={"int8": 3},
            quantised_layers=3,
            device="CPUExecutionProvider",
            proven=True,
            detail="3 of 3 layers compute in int8",
        ),
    )
