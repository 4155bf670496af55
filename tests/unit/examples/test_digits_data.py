"""The digits are cut without leakage, the same way everywhere."""

import numpy as np
import pytest

from enginegate.data import read_data
from examples.digits.data import TRAFFIC_REQUESTS, moved, read_digits


@pytest.fixture(scope="module")
def digits():
    return read_digits()


def test_no_image_is_in_two_sets(digits):
    """Training, calibration and evaluation share no scan, not even an equal one."""
    sets = [
        {image.tobytes() for image in images}
        for images in (
            digits.training_images,
            digits.calibration.inputs["image"],
            digits.evaluation.inputs["image"],
        )
    ]

    assert sum(map(len, sets)) == len(set.union(*sets)) == 1797


def test_evaluation_is_stratified(digits):
    """Every slice has enough evaluation images to be judged by the example's policy."""
    for column in digits.evaluation.slices.values():
        _, counts = np.unique(column, return_counts=True)
        assert counts.min() >= 60
    assert set(digits.evaluation.slices["stroke"]) == {"thin", "medium", "bold"}


def test_faint_images_are_the_darkest(digits):
    """The slice says which they are: their brightest point is below any other image's."""
    brightest = digits.evaluation.inputs["image"].max(axis=(1, 2, 3))
    faint = digits.evaluation.slices["light"] == "faint"

    assert brightest[faint].max() < 0.01
    assert brightest[~faint].min() > 0.5


def test_traffic_is_like_production(digits):
    """Traffic has no labels, favours some digits, and holds no training image."""
    traffic = digits.traffic
    _, counts = np.unique(traffic.slices["digit"], return_counts=True)
    trained = {image.tobytes() for image in digits.training_images}

    assert traffic.labels is None
    assert len(traffic) == TRAFFIC_REQUESTS
    assert counts.max() > 3 * counts.min()
    assert not trained & {image.tobytes() for image in traffic.inputs["image"]}
    assert (traffic.inputs["image"].min(), traffic.inputs["image"].max()) == (0.0, 1.0)


def test_same_cut_every_time(digits, tmp_path):
    """Written files read back as the same data, and writing again gives the same bytes."""
    digits.write(tmp_path)
    first = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    read_digits().write(tmp_path)

    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == first
    assert set(first) == {"calibration.npz", "evaluation.npz", "traffic.npz"}
    evaluation = read_data(tmp_path / "evaluation.npz")
    assert evaluation.sha256 == digits.evaluation.sha256
    assert evaluation.inputs["image"].shape[1:] == (1, 8, 8)


def test_moved():
    """One pixel down and right; what leaves the image is gone, what enters is black."""
    image = np.arange(1, 65, dtype=np.float32).reshape(1, 1, 8, 8)

    result = moved(image, np.array([[1, 1]]))

    assert (result[0, 0, 0] == 0).all()
    assert (result[0, 0, :, 0] == 0).all()
    assert (result[0, 0, 1:, 1:] == image[0, 0, :-1, :-1]).all()
