"""The one door to Pillow: encoded images become arrays, by the rules of a policy.

Images come from other teams. Formats that a decoder hands to another program (PostScript) are not
opened, and no image of more pixels than `MOST_PIXELS` is.
"""

import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from enginegate.data import Array
from enginegate.errors import DataError
from enginegate.messages import first_line
from enginegate.policy.data import ImageRules

MOST_PIXELS = 80_000_000
"""A camera's largest photographs; a small file can claim a thousand times as many, and Pillow warns
of those that are a little larger than this."""
ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"})
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_DEEP_MODES = frozenset({"I", "F", "I;16", "I;16B", "I;16L", "I;16N"})
# Decoding leaves Python's lock; more threads than this wait for memory.
_MOST_THREADS = 8


def decoder_version() -> str:
    """What decodes images: another version may give other pixels."""
    return f"Pillow {_vendor().__version__}"


def decode_images(
    encoded: Sequence[bytes],
    rules: ImageRules,
    origin: str,
    *,
    first: int = 0,
    names: Sequence[str] = (),
) -> Array:
    """Images of one size as an array, shape ``(N, C, H, W)``, or ``(N, H, W, C)`` for ``nhwc``.

    Args:
        origin: of the data, for messages.
        first: the number of the first sample, for messages.
        names: of the images, for messages: their files, as a rule; empty where not known.

    Raises:
        DataError: one cannot be decoded, is too large, or the images differ in size.
    """
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        said = [f" ({name})" for name in names] or [""] * len(encoded)
        named = (
            (content, f"{origin}, sample {first + at}{said[at]}")
            for at, content in enumerate(encoded)
        )
        arrays = list(pool.map(lambda each: _decoded(each[0], rules, each[1]), named))
    sizes = {array.shape for array in arrays}
    if len(sizes) > 1:
        one, other, *_ = sorted(sizes)
        raise DataError(
            f"{origin}: images differ in size, {one} and {other}. State size, or shorter_side "
            "and crop, under [data.images], as the model was trained."
        )
    return np.stack(arrays)


def _decoded(content: bytes, rules: ImageRules, origin: str) -> Array:
    vendor = _vendor()
    try:
        with vendor.Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            _check(image, origin)
            turned = vendor.ImageOps.exif_transpose(image) if rules.exif else image
            plain = turned.convert("RGB" if rules.channels == 3 else "L")  # noqa: PLR2004 - RGB
            return _as_array(_sized(plain, rules, origin), rules)
    except DataError:
        raise
    except MemoryError as error:
        raise DataError(
            f"{origin}: there is not enough memory to decode the image. Make it smaller, or free "
            "memory on this machine."
        ) from error
    except Exception as error:  # a damaged image makes Pillow's decoders raise whatever
        raise DataError(
            f"{origin}: the image cannot be decoded: {_reason(error)}. Images are "
            f"{', '.join(_FORMATS)}."
        ) from error


def _reason(error: Exception) -> str:
    """Decoders raise exceptions without any words, too."""
    return first_line(error).rstrip(".") or type(error).__name__


def _check(image: Any, origin: str) -> None:
    """Refuse an image by its header, before it is decoded."""
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise DataError(
            f"{origin}: the image says that it has {width} x {height} pixels; more than "
            f"{MOST_PIXELS:,} are not decoded. Make it smaller."
        )
    if image.mode in _DEEP_MODES:
        raise DataError(
            f"{origin}: the image has more than 8 bits a channel (mode {image.mode}), which its "
            "conversion would cut off. Convert it to 8 bits as for training, or give arrays."
        )


def _sized(image: Any, rules: ImageRules, origin: str) -> Any:
    vendor = _vendor()
    how = vendor.Image.Resampling[rules.resample.upper()]
    if rules.size:
        height, width = rules.size
        image = _resized(image, width, height, how, origin)
    if rules.shorter_side:
        shorter = min(image.size)
        width, height = (side * rules.shorter_side // shorter for side in image.size)
        image = _resized(image, width, height, how, origin)
    if rules.crop:
        height, width = rules.crop
        if width > image.size[0] or height > image.size[1]:
            raise DataError(
                f"{origin}: the image of {image.size[0]} x {image.size[1]} pixels is smaller than "
                f"[data.images] crop, {width} x {height}. Resize first."
            )
        left, top = round((image.size[0] - width) / 2), round((image.size[1] - height) / 2)
        image = image.crop((left, top, left + width, top + height))
    return image


def _resized(image: Any, width: int, height: int, how: Any, origin: str) -> Any:
    """The image in another size; a narrow strip's longer side may grow without end."""
    if width * height > MOST_PIXELS:
        before = f"{image.size[0]} x {image.size[1]}"
        raise DataError(
            f"{origin}: [data.images] makes the image of {before} pixels one of {width} x "
            f"{height}; more than {MOST_PIXELS:,} are not decoded. Crop or remove the image, or "
            "state size instead of shorter_side."
        )
    return image.resize((width, height), how)


def _as_array(image: Any, rules: ImageRules) -> Array:
    pixels: Array = np.asarray(image, np.uint8)
    pixels = pixels if pixels.ndim == 3 else pixels[..., None]  # noqa: PLR2004 - H, W, C
    if rules.dtype == "float32":
        pixels = pixels.astype(np.float32) / np.float32(rules.divide_by)
        if rules.mean:
            pixels = pixels - np.asarray(rules.mean, np.float32)
        if rules.std:
            pixels = pixels / np.asarray(rules.std, np.float32)
    return pixels if rules.layout == "nhwc" else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _vendor() -> Any:
    try:
        import PIL.Image  # noqa: PLC0415
        import PIL.ImageOps  # noqa: PLC0415
    except ImportError as error:
        raise DataError(
            "The data holds images, and Pillow is not installed. Run: pip install "
            "'enginegate[images]'"
        ) from error
    return PIL
