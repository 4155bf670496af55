"""Packages of other compilers: how a batch that they do not serve is noticed."""

import numpy as np
import pytest

from enginegate.candidate import TensorSpec
from enginegate.engines.torch_inductor import foreign
from enginegate.engines.torch_inductor.foreign import PackageRefusedError, try_foreign
from enginegate.engines.torch_inductor.process import PackageJob

torch = pytest.importorskip("torch")

IMAGE = TensorSpec(name="x", dtype="float32", shape=(-1, 6))
CLASSES = TensorSpec(name="y", dtype="float32", shape=(-1, 3))


@pytest.fixture
def tried(tmp_path, monkeypatch):
    """Try what behaves like a package."""

    def run(call, *, buckets=()):
        monkeypatch.setattr(
            foreign, "open_calls", lambda _, sizes, **__: dict.fromkeys(sizes, call)
        )
        job = PackageJob(
            program=None,
            package=tmp_path / "model.pt2",
            precision="fp32",
            device="cpu",
            inputs=("x",),
            max_batch_size=8,
            working_batch=8,
            buckets=buckets,
            profiles={},
            autotune=False,
            graphs=False,
            memory_mib=100,
            stamp={},
            specs=(IMAGE,),
            answers=(CLASSES,),
        )
        return try_foreign(job)

    return run


WEIGHTS = torch.from_numpy(np.linspace(-1, 1, 18, dtype=np.float32).reshape(6, 3))


def only_four(x):
    if len(x) != 4:
        raise RuntimeError("expected dim 0 to be 4")
    return [x @ WEIGHTS]


def test_every_batch_up_to_the_largest_is_run(tried):
    """The smallest, one between, and the largest."""
    assert set(tried(lambda x: [x @ WEIGHTS])) == {"1", "4", "8"}


def test_fixed_batch_is_served_where_the_policy_states_it(tried):
    """Requests of other sizes are padded to it."""
    assert set(tried(only_four, buckets=(4,))) == {"4"}
    with pytest.raises(
        PackageRefusedError, match=r"does not take 1 rows .* State batch, if it takes one"
    ):
        tried(only_four)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: [(x - x[:1]) @ WEIGHTS], "depends on the rows beside it"),
        (lambda x: [(x - x.mean(0)) @ WEIGHTS], "others than before, .* the rows beside it"),
        (lambda x: [x @ WEIGHTS / x.std()], "others than before, answers differ"),
        (lambda x: [(x @ WEIGHTS).half()], "it answers float16"),
        (lambda x: [x @ WEIGHTS, x], "Compile it with the model's outputs"),
        (lambda x: [x @ WEIGHTS[:, :2]], "and the model y: float32"),
    ],
)
def test_wrong_tensors_and_mixed_rows_are_refused(tried, call, said):
    with pytest.raises(PackageRefusedError, match=said):
        tried(call)
