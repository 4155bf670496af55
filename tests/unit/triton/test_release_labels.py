"""Release digests in a configuration."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginegate.candidate import TensorSpec
from enginegate.serving import ServingConfig
from enginegate.triton.config import config_text, model_config, read_config
from enginegate.triton.ensemble_config import ensemble_config
from enginegate.triton.release_labels import read_labels, write_labels

X = TensorSpec(name="x", dtype="float32", shape=(-1, 2))
DIGEST = "5c" * 32

versions = st.integers(1, 10**6)
digests = st.text("0123456789abcdef", min_size=64, max_size=64)


def engine():
    serving = ServingConfig(max_batch_size=4, max_queue_delay_us=0, instances=2)
    return model_config(
        name="m", inputs=(X,), outputs=(X,), serving=serving, backend="python", parameters={}
    )


def ensemble():
    return ensemble_config("m", (), inputs=(X,), outputs=(X,), max_batch_size=4)


@given(told=st.dictionaries(versions, digests, max_size=4))
@pytest.mark.parametrize("make", [engine, ensemble])
def test_labels_are_read_back(make, told):
    """Digests come back by version, also from the text on disk."""
    config = make()
    if "ensemble" in make.__name__:
        config.message.ensemble_scheduling.SetInParent()

    write_labels(config, told)

    assert read_labels(read_config(config_text(config), "config.pbtxt")) == told


def test_engine_is_labelled_without_a_parameter():
    """A changed parameter would have Triton load every version again; a name does not."""
    config = engine()

    write_labels(config, {3: DIGEST})

    assert (config.parameters, config.serving.instances) == ({}, 2)


@pytest.mark.parametrize(
    "told",
    [{0: DIGEST}, {1: DIGEST.upper()}, {1: "short"}, {1: f"{DIGEST}; rm -rf x"}],
    ids=["version", "capitals", "length", "shell"],
)
def test_malformed_digest_is_refused(told):
    """Triton puts the name on a shell's command line."""
    with pytest.raises(ValueError, match="does not name releases"):
        write_labels(engine(), told)


@pytest.mark.parametrize("name", ["", "release", "gpu_0", f"release-1-{DIGEST}x", "release-1-5c"])
def test_other_names_carry_nothing(name):
    """A name that somebody else chose is not taken for a digest."""
    config = engine()
    config.message.instance_group[0].name = name

    assert read_labels(config) == {}
