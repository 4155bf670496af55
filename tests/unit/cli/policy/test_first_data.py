"""What a first policy says of data that nobody has described."""

import numpy as np
from PIL import Image

from enginegate.candidate import TensorSpec
from enginegate.cli.policy.first_data import ColumnFlags, described_source
from enginegate.data_sources import load_data


def test_images_become_what_the_model_takes(tmp_path, monkeypatch):
    """Channels, size and layout show in its input; classes are the folders."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ENGINEGATE_HOME", raising=False)
    for name, shape in (("cat/a.png", (6, 8, 3)), ("dog/b.png", (9, 7, 3))):
        (tmp_path / "pets" / name).parent.mkdir(parents=True)
        Image.fromarray(np.zeros(shape, np.uint8)).save(tmp_path / "pets" / name)
    wanted = (TensorSpec(name="pixels", dtype="float32", shape=(-1, 4, 4, 1)),)

    found = described_source("pets", tmp_path, ColumnFlags(), wanted)
    data = load_data(found.source)

    data.check_fits(wanted)
    assert data.labels.tolist() == [0, 1]
    assert data.slices == {}
