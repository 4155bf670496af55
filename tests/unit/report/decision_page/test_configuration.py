"""The chosen configuration, each line with the measurement that chose it."""

import pytest

from enginegate.report.decision_page.configuration import configuration_section
from enginegate.serving import ServingConfig, ServingOptions
from tests.fakes.evidence import INT8, benchmark, engine_speed, scorecard

CHOSEN = ServingConfig(
    max_batch_size=16, max_queue_delay_us=500, instances=2, preferred_batch_sizes=(8, 4)
)


def lines(speeds=(), **changes):
    fields = {"chosen": CHOSEN, "backend": "onnxruntime"}
    measured = benchmark().model_copy(update=fields | changes)
    card = scorecard(benchmarks=(measured,), engine_speeds=speeds)
    return [(line.text.strip(), line.chosen_by) for line in configuration_section(card).lines]


def test_each_line_says_what_chose_it():
    """A reason stands beside the line of its field, and nowhere else."""
    why = {"max_batch_size": "16 was confirmed", "instances": "1 sustained 300/s at most"}

    found = lines(reasons=why)

    assert found == [
        ('backend: "onnxruntime"', "the engine was measured in this backend"),
        ("max_batch_size: 16", "16 was confirmed"),
        ("dynamic_batching {", ""),
        ("preferred_batch_size: 4", ""),
        ("preferred_batch_size: 8", ""),
        ("max_queue_delay_microseconds: 500", ""),
        ("}", ""),
        ("instance_group {", ""),
        ("count: 2", "1 sustained 300/s at most"),
        ("kind: KIND_CPU", ""),
        ("}", ""),
    ]


def test_streams_of_our_runner_on_a_gpu():
    """There Triton has one instance, whose process computes several batches at once."""
    speed = engine_speed(INT8, device="sm90 NVIDIA H200")

    found = lines((speed,), backend="python", reasons={"instances": "2 was confirmed"})

    assert ("count: 1", "") in found
    assert ("kind: KIND_GPU", "") in found
    assert ('value { string_value: "2" }', "2 was confirmed") in found


def test_processes_of_our_runner_are_instances_of_triton():
    """Each of them is one on every GPU."""
    shared = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1, processes=3)
    speed = engine_speed(INT8, device="sm90 NVIDIA H200")

    found = lines(
        (speed,), backend="python", chosen=shared, reasons={"processes": "3 was confirmed"}
    )

    assert ("count: 3", "3 was confirmed") in found
    assert ('value { string_value: "1" }', "") in found


def test_without_batching_there_is_no_block():
    """Each request runs alone."""
    alone = ServingConfig(
        max_batch_size=1, max_queue_delay_us=0, instances=1, dynamic_batching=False
    )

    assert "dynamic_batching {" not in [text for text, _ in lines(chosen=alone)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (ServingOptions(), []),
        (ServingOptions(max_queue_size=64), [("# max_queue_size = 64", "[serving] of the policy")]),
    ],
)
def test_settings_of_the_policy_are_named(options, expected):
    """Triton's defaults are not."""
    assert [line for line in lines(options=options) if line[0].startswith("#")] == expected


def test_host_and_versions_without_a_winner():
    """They are evidence even where nothing is proposed."""
    found = configuration_section(
        scorecard(winner=None, environment={"python": "3.11", "gpu": "H"})
    )

    assert found.lines == ()
    assert [(fact.name, fact.value) for fact in found.host] == [
        ("server", "Triton 2.51.0, CPU"),
        ("gpu", "H"),
        ("python", "3.11"),
    ]
