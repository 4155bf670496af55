"""Images become arrays by the rules of a policy; a stranger's image can do no harm."""

import io
import struct
import zlib

import datasets
import numpy as np
import pytest
from PIL import Image

from enginegate.data_sources import load_data
from enginegate.errors import DataError
from enginegate.policy.data import ImageRules


def png(array, **options):
    """An image's bytes."""
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG", **options)
    return buffer.getvalue()


def pixels(seed=0, size=(6, 8)):
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)


@pytest.fixture
def folder(tmp_path):
    """Two images of cats and one of a dog."""
    root = tmp_path / "pets"
    for place, name in enumerate(("dog/rex.png", "cat/mia.png", "cat/tom.png")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(png(pixels(place)))
    (root / "cat" / "notes.txt").write_text("not an image")
    return root


def test_folder_of_classes(folder, source):
    """Labels are the folders in alphabetical order, ids the files."""
    found = load_data(source(folder))

    assert found.inputs["image"].shape == (3, 3, 6, 8)
    assert found.labels.tolist() == [0, 0, 1]
    assert found.ids.tolist() == ["cat/mia.png", "cat/tom.png", "dog/rex.png"]
    expected = pixels(1).transpose(2, 0, 1).astype(np.float32) / 255
    assert np.array_equal(found.inputs["image"][0], expected)


def test_classes_in_the_models_order(folder, source):
    found = load_data(source(folder, columns={"classes": ["dog", "bird", "cat"]}))

    assert found.labels.tolist() == [2, 2, 0]


def test_preprocessing_is_as_the_policy_says(folder, source):
    """Resized by its shorter side, cropped in the middle, normalised, channels last."""
    rules = {
        "shorter_side": 4,
        "crop": [4, 4],
        "resample": "bicubic",
        "mean": [0.5, 0.4, 0.3],
        "std": [0.2, 0.3, 0.4],
        "layout": "nhwc",
    }

    found = load_data(source(folder, images=rules, columns={"inputs": {"pixels": "image"}}))

    resized = Image.fromarray(pixels(1)).resize((5, 4), Image.Resampling.BICUBIC)
    cropped = np.asarray(resized.crop((0, 0, 4, 4)), np.float64) / 255
    expected = (cropped - [0.5, 0.4, 0.3]) / [0.2, 0.3, 0.4]
    assert found.inputs["pixels"].shape == (3, 4, 4, 3)
    assert np.allclose(found.inputs["pixels"][0], expected, atol=1e-6)


def test_grey_bytes_stay_bytes(folder, source):
    found = load_data(source(folder, images={"channels": 1, "dtype": "uint8", "size": [2, 2]}))

    assert found.inputs["image"].shape == (3, 1, 2, 2)
    assert found.inputs["image"].dtype == np.uint8


def test_photographs_are_turned(tmp_path, source):
    """A camera held upright writes its image lying down, and says so."""
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(png(pixels(), exif=exif))

    turned = load_data(source("photos"))
    plain = load_data(source("photos", images={"exif": False}))

    assert turned.inputs["image"].shape == (1, 3, 8, 6)
    assert plain.inputs["image"].shape == (1, 3, 6, 8)


def test_images_of_a_hugging_face_dataset(tmp_path, source):
    """Their classes have names, which the policy may put in another order."""
    kinds = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    )
    rows = {"image": [{"bytes": png(pixels(n)), "path": None} for n in (0, 1)], "label": [0, 1]}
    datasets.Dataset.from_dict(rows, features=kinds).save_to_disk(str(tmp_path / "hf"))

    found = load_data(source("hf", columns={"classes": ["dog", "cat"]}))

    assert np.array_equal(
        found.inputs["image"][0] * 255, pixels(0).transpose(2, 0, 1).astype(np.float32)
    )
    assert found.labels.tolist() == [1, 0]


def test_path_in_a_dataset_is_not_followed(tmp_path, source):
    """An image without bytes would be read from wherever its path leads."""
    secret = tmp_path / "secret.png"
    secret.write_bytes(png(pixels()))
    kinds = datasets.Features(
        {"image": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}}
    )
    rows = {"image": [{"bytes": None, "path": str(secret)}]}
    datasets.Dataset.from_dict(rows, features=kinds).save_to_disk(str(tmp_path / "hf"))

    with pytest.raises(DataError, match="1 image without its bytes"):
        load_data(source("hf"))


def test_link_out_of_the_folder_is_refused(folder, source, tmp_path):
    (tmp_path / "secret.png").write_bytes(png(pixels()))
    (folder / "cat" / "linked.png").symlink_to(tmp_path / "secret.png")

    with pytest.raises(DataError, match=r"linked\.png is a link that leads out of"):
        load_data(source(folder))


def claimed(width, height):
    """A small PNG that says it is a large one."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"0")), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(claimed(9000, 9500), "sample 1 .* 9000 x 9500 pixels", id="many-pixels"),
        pytest.param(claimed(100_000, 100_000), "sample 1 .*exceeds limit", id="endless-pixels"),
        pytest.param(png(pixels())[:60], "cannot be decoded", id="cut-short"),
        pytest.param(b"%!PS-Adobe-3.0 EPSF-3.0\n", "cannot be decoded", id="postscript"),
        pytest.param(png(np.zeros((2, 2), np.uint16)), "more than 8 bits", id="sixteen-bits"),
        pytest.param(png(pixels(size=(4, 4))), "images differ in size", id="another-size"),
    ],
)
def test_image_that_is_not_decoded(folder, source, content, message):
    """By its header where that tells; the message says what to do."""
    (folder / "cat" / "other.png").write_bytes(content)

    with pytest.raises(DataError, match=message):
        load_data(source(folder))


def test_image_that_is_smaller_than_the_crop(folder, source):
    with pytest.raises(DataError, match="8 x 6 pixels is smaller than"):
        load_data(source(folder, images={"crop": [7, 7]}))


def test_strip_that_grows_without_end(folder, source):
    """Its shorter side of one pixel is made 224, and its longer one grows as much."""
    (folder / "cat" / "strip.png").write_bytes(png(np.zeros((1, 20_000, 3), np.uint8)))

    message = r"cat/strip\.png\): .* 20000 x 1 pixels one of 4480000 x 224; .* state size"
    with pytest.raises(DataError, match=message):
        load_data(source(folder, images={"shorter_side": 224, "crop": [224, 224]}))


@pytest.mark.parametrize(
    ("error", "message"), [(MemoryError(), "not enough memory"), (ValueError(), "ValueError")]
)
def test_decoder_that_fails_without_words(folder, source, monkeypatch, error, message):
    """The message gives a reason of its own."""

    def fail(*_args, **_options):
        raise error

    monkeypatch.setattr(Image, "open", fail)

    with pytest.raises(DataError, match=message):
        load_data(source(folder))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"size": [4, 4], "shorter_side": 4}, "both resize"),
        ({"mean": [0.5]}, "mean needs 3 numbers"),
        ({"mean": [0.5] * 3, "dtype": "uint8"}, 'for dtype = "float32"'),
    ],
)
def test_rules_that_contradict_each_other(rules, message):
    with pytest.raises(ValueError, match=message):
        ImageRules.model_validate(rules)


def test_folder_that_is_no_class(folder, source):
    with pytest.raises(DataError, match="the folder 'cat', which is none of"):
        load_data(source(folder, columns={"classes": ["dog", "bird"]}))


@pytest.mark.parametrize("file", [None, "bird.heic"])
def test_class_without_a_readable_image(folder, source, file):
    """Left out, it would shift the labels of all classes after it; stated classes cannot shift."""
    (folder / "bird").mkdir()
    (folder / ".thumbnails").mkdir()
    if file:
        (folder / "bird" / file).write_bytes(b"no image")

    with pytest.raises(DataError, match="the folder 'bird' without an image"):
        load_data(source(folder))
    found = load_data(source(folder, columns={"classes": ["bird", "cat", "dog"]}))
    assert found.labels.tolist() == [1, 1, 2]


def test_images_beside_folders_of_classes(folder, source):
    (folder / "loose.png").write_bytes(png(pixels()))

    with pytest.raises(DataError, match=r"e\.g\. 'loose\.png'"):
        load_data(source(folder))
