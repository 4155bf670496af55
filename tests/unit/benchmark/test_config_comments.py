"""The winner's configuration for people says what chose each line."""

import pytest

from enginegate.benchmark.config_comments import annotated_config
from enginegate.candidate import TensorSpec
from enginegate.serving import ServingConfig
from enginegate.triton.config import Config, config_text, model_config, read_config

REASONS = {
    "max_batch_size": "8 was confirmed at 800/s; batch <= 4 sustained 500/s at most",
    "max_queue_delay_us": "1000: p99 9 ms, against 12 ms with 0",
    "preferred_batch_sizes": "4/8: as good as none",
    "instances": "2: measurement 5",
}


def config(*, gpu=False, **serving):
    fields = {"max_batch_size": 8, "max_queue_delay_us": 1000, "instances": 2}
    spec = TensorSpec(name="x", dtype="float32", shape=(-1, 4))
    return model_config(
        name='di"gits {',
        inputs=(spec,),
        outputs=(spec,),
        serving=ServingConfig(**(fields | serving)),
        backend="python",
        parameters={"note": "# no comment {"},
        gpu=gpu,
    )


@pytest.mark.parametrize(
    "served",
    [
        pytest.param(config(preferred_batch_sizes=(4, 8)), id="everything"),
        pytest.param(config(max_queue_delay_us=0), id="a-default"),
        pytest.param(config(dynamic_batching=False, max_queue_delay_us=0), id="no-batching"),
    ],
)
def test_annotated_config_reads_back_equal(served):
    """Comments change nothing, whatever the reasons hold."""
    hostile = REASONS | {"instances": 'two\nlines } { "x" # y', "unheard_of": "a\x0bb\x85c"}

    text = annotated_config(served, hostile, origin="made\nby a test")

    assert read_config(text, "test") == served
    assert config_text(read_config(text, "test")) == config_text(served)


def test_each_reason_stands_above_its_line():
    """At its line's indent, once, also where a value is a list."""
    lines = annotated_config(config(preferred_batch_sizes=(4, 8)), REASONS).splitlines()

    above = {line.strip(): lines[number - 1] for number, line in enumerate(lines)}
    assert above["max_batch_size: 8"] == f"# {REASONS['max_batch_size']}"
    assert above["count: 2"] == "  # 2: measurement 5"
    assert above["max_queue_delay_microseconds: 1000"].startswith("  # 1000: p99 9 ms")
    assert sum("as good as none" in line for line in lines) == 1


def test_reasons_of_our_runner_stand_at_its_processes_and_its_streams():
    """On a GPU Triton's instances are its processes, and a parameter has the streams."""
    why = {"instances": "1: measurement 5", "processes": "3 was confirmed"}

    lines = annotated_config(config(gpu=True, instances=1, processes=3), why).splitlines()

    above = {line.strip(): lines[number - 1] for number, line in enumerate(lines)}
    assert above["count: 3"] == "  # 3 was confirmed"
    assert "# streams: 1: measurement 5" in lines


def test_default_is_explained_where_its_line_would_be():
    """Triton's text leaves out a delay of 0; its reason is not lost."""
    lines = annotated_config(config(max_queue_delay_us=0), REASONS).splitlines()

    block = lines.index("dynamic_batching {")
    said = [line for line in lines if "max_queue_delay_microseconds is Triton's default" in line]
    assert said == [lines[block - 2]]
    assert all(len(line) <= 100 for line in lines)


def test_lines_that_follow_from_others_say_so():
    """Graphs and warm-up are of the sizes above them; each sentence stands once."""
    message = config(preferred_batch_sizes=(4,)).message
    for size in (1, 4, 8):
        message.optimization.cuda.graph_spec.add(batch_size=size)

    lines = annotated_config(Config(message), {}).splitlines()

    (graphs,) = (place for place, line in enumerate(lines) if "CUDA graph" in line)
    (warmup,) = (place for place, line in enumerate(lines) if "counts as ready" in line)
    assert lines[graphs + 1].strip() == "graph_spec {"
    assert lines[warmup + 1] == "model_warmup {"
