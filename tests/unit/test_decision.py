"""A release's record: one engine for each kind of device."""

import pytest
from pydantic import ValidationError

from enginegate.decision import Release
from enginegate.errors import RepositoryError
from tests.fakes.evidence import release


def test_engine_is_found_by_device_kind():
    """A release is seen from a repository of one kind; else it is as its publisher has it."""
    one = release(backend="onnxruntime")
    gpu = one.engine.model_copy(update={"device": "gpu", "backend": "tensorrt"})
    both = Release(**(dict(one) | {"engines": (one.engine, gpu)}))

    assert (one.engine.backend, one.engine.gpu) == ("onnxruntime", False)
    assert (both.engine_for("gpu").backend, both.engine_for("gpu").gpu) == ("tensorrt", True)
    assert both.engine == both.seen_from("").engine == one.engine
    assert both.seen_from("gpu").engine == gpu
    assert both.seen_from("gpu").digest == both.digest
    with pytest.raises(RepositoryError, match="engines for cpu, gpu"):
        both.seen_from("tpu")
    with pytest.raises(RepositoryError, match="tpu is asked for"):
        both.engine_for("tpu")


def test_two_engines_for_one_kind_of_device_are_refused():
    """Nobody could say which of them serves."""
    one = release()

    with pytest.raises(ValidationError, match="same kind of device"):
        Release(**(dict(one) | {"engines": (one.engine, one.engine)}))
