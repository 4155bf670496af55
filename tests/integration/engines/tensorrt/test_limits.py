"""A builder without an end: out of time, tried again at a lower level, out of memory."""

import pytest

from enginegate.engines.tensorrt import process
from enginegate.engines.tensorrt.library import TensorRtLibrary
from enginegate.engines.tensorrt.process import compile_plan
from enginegate.errors import BuildError


@pytest.fixture
def compiled(plan, foreign, tmp_path, monkeypatch):
    """Builds by the Python that has the fault, under a policy table."""

    def make(fault, **table):
        monkeypatch.setenv("FAULT", fault)
        library = TensorRtLibrary(
            foreign, "tensorrt", "tensorrt", "8.6.0", {"cudnn": "empty"}, tells_progress=False
        )
        folder = tmp_path / "engines" / "one"
        folder.mkdir(parents=True)
        planned = plan("tensorrt-fp16", tensorrt=table)
        return compile_plan(planned, b"onnx", folder / "model.plan", library=library, targets=())

    return make


def test_a_slow_build_says_what_makes_it_quicker(compiled):
    """Its time is over: the error names the level to lower, and that timings are not kept."""
    with pytest.raises(BuildError) as error:
        compiled("slow-build", timeout_s=0.5)

    text = str(error.value)
    assert "tensorrt-fp16 took longer than timeout_s = 0.5 and was stopped." in text
    assert "lower builder_optimization_level there" in text
    assert 'when_slow = "lower"' in text
    assert "timings of a build that was stopped are not kept" in text


def test_a_slow_build_is_tried_again_at_a_lower_level(compiled, monkeypatch, caplog):
    """Where the policy says so, the rest of the time goes to a quicker search for kernels."""
    monkeypatch.setattr(process, "FIRST_ATTEMPT", 0.01)

    report = compiled("slow-build", timeout_s=100.0, when_slow="lower")

    assert report.flags["optimization_level"] == "1"
    assert report.flags["without"] == "cudnn empty"
    assert "so once more at builder_optimization_level = 1" in caplog.text


def test_a_build_that_is_low_already_is_not_tried_twice(compiled):
    """Level 0 has nothing below it that is worth the time."""
    with pytest.raises(BuildError, match=r"stopped\. Raise it"):
        compiled("slow-build", timeout_s=0.5, when_slow="lower", builder_optimization_level=0)


def test_a_builder_on_a_gpu_is_stopped_at_its_memory_limit(compiled):
    """CUDA reserves more addresses than any limit, so the memory that is held is watched."""
    with pytest.raises(BuildError, match=r"out of memory: raise memory_mib = 200 in \[tensorrt\]"):
        compiled("hungry-build", memory_mib=200)
