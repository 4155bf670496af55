"""Outputs of a small classifier and of candidates that are broken in known ways."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from enginegate.data import Array, DataSet
from enginegate.policy import Gates
from validation.agreement import OutputComparison, compare

SAMPLES = 900
CLASSES = 10


@dataclass
class Case:
    """A reference that is right on most samples, and the data that it ran on."""

    data: DataSet
    reference: Array

    def compare(self, candidate: Array, scope: str = "evaluation") -> OutputComparison:
        return compare({"logits": self.reference}, {"logits": candidate}, self.data, scope)


@pytest.fixture(scope="session")
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
def case() -> Case:
    return _case(SAMPLES)


@pytest.fixture
def case_of() -> Callable[[int], Case]:
    return _case


def _case(samples: int) -> Case:
    rng = np.random.default_rng(0)
    labels = np.arange(samples) % CLASSES
    logits = rng.normal(size=(samples, CLASSES)).astype(np.float32)
    logits[np.arange(samples), labels] += 5.0
    ink = np.array(["faint", "usual", "heavy"])[rng.integers(0, 3, samples)]
    return Case(
        data=DataSet(
            origin="eval.npz",
            inputs={"image": np.zeros((samples, 1), np.float32)},
            labels=labels.astype(np.int64),
            ids=np.array([f"s{row}" for row in range(samples)], dtype=np.str_),
            slices={"digit": labels.astype(np.str_), "ink": ink.astype(np.str_)},
        ),
        reference=logits,
    )


@pytest.fixture
def clean(case) -> Array:
    """The reference's logits with the noise of a good quantisation."""
    rng = np.random.default_rng(1)
    noise = rng.normal(scale=0.03, size=case.reference.shape)
    return (case.reference + noise).astype(np.float32)
