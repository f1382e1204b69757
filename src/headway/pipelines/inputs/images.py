"""Images in any form, opened, checked and converted: `load_image` returns a PIL image with 8 bits per channel.

Nothing is fetched from the network, and nothing is decoded before its size is known to be within the limit. The model's
own preprocessing is in `image_transforms`.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import stat
import threading
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from headway.base.errors import InvalidInput, Unsupported, WrongType
from headway.base.text import short_repr
from headway.pipelines.task import wrong_type

MAX_PIXELS = 89_478_485  # a quarter of a gigabyte in RGB; PIL's own warning limit
MAX_BYTES = 1 << 32  # of a file
FORMATS = (
    "PNG",
    "JPEG",
    "MPO",
    "WEBP",
    "GIF",
    "BMP",
    "TIFF",
    "PPM",
    "AVIF",
    "JPEG2000",
    "ICO",
)  # none of them runs external programs
EXPECTED = "an image: a PIL image, a numpy array, bytes or the path of an image file"
ORIENTATION = 0x0112
_loading = threading.Lock()  # two threads must not load one file-backed PIL image


def pil() -> Any:
    """PIL.Image, or an error that names the extra to install."""
    try:
        from PIL import Image
    except ImportError:
        raise Unsupported("images need Pillow, which is not installed: pip install 'headway[pipelines]'") from None
    return Image


def is_image(value: Any) -> bool:
    """Whether `value` is one image rather than several."""
    if isinstance(value, (str, bytes, bytearray, memoryview, os.PathLike, Mapping, np.ndarray)):
        return True
    return isinstance(value, pil().Image) or is_cpu_tensor(value)


def load_image(item: Any, *, max_pixels: int = MAX_PIXELS, mode: str = "RGB") -> Any:
    """A PIL image with 8 bits per channel, upright, in `mode` (RGB or L); the first frame of an animation.

    Arrays are [H, W], [H, W, 1|3|4] or [1|3|4, H, W], integers in [0, 255] (uint16: [0, 65535]) or floats in [0, 1].
    """
    if isinstance(item, Mapping):
        item = _of_dict(item)
    if isinstance(item, pil().Image):
        check_size(item.size, max_pixels)
        with _loading:
            _decoded(item, "the image")
        return _converted(item, mode)
    if isinstance(item, np.ndarray) or is_cpu_tensor(item):
        return _converted(_of_array(np.asarray(item), max_pixels), mode)
    if isinstance(item, (bytes, bytearray, memoryview)):
        return _opened(bytes(item), f"the {len(bytes(item))} bytes", max_pixels, mode)
    if isinstance(item, (str, os.PathLike)):
        return _opened(*_read(item), max_pixels, mode)
    raise wrong_type(item, EXPECTED)


# -- opening -----------------------------------------------------------------------------------------------------------


def _of_dict(item: Mapping[str, Any]) -> Any:
    """The image in {"image": ...}, or in {"bytes": ..., "path": ...} as in datasets."""
    if set(item) == {"image"}:
        return item["image"]
    if item and set(item) <= {"bytes", "path"}:
        return item["bytes"] if item.get("bytes") is not None else item.get("path")
    raise InvalidInput(f'a dict must have the key "image", or "bytes" and "path", not {sorted(map(str, item))}')


def _read(path: str | os.PathLike[str]) -> tuple[bytes, str]:
    """The bytes of a path or a data: URL, and their name for messages."""
    text = os.fspath(path)
    if isinstance(text, str) and text.startswith("data:"):
        head, _, body = text.partition(",")
        if not head.endswith(";base64"):
            raise InvalidInput(f"{short_repr(head)} is not a data:image/...;base64, URL; pass bytes or a path")
        try:
            return base64.b64decode(body, validate=True), f"the data {short_repr(head)}"
        except binascii.Error as error:
            raise InvalidInput(f"the text after {short_repr(head)} is not valid base64: {error}") from error
    return read_file(path, "image")


def read_file(path: str | os.PathLike[str], what: str) -> tuple[bytes, str]:
    """The content of a local file and its name; URLs are an error, because nothing is fetched."""
    text = os.fspath(path)
    scheme, separator, _ = str(text).partition("://")
    if separator and scheme.isalpha():
        raise InvalidInput(
            f"{str(text)!r:.80} is a URL, and pipelines never use the network; "
            f"download the {what} first and pass its bytes or its path"
        )
    try:
        state = Path(text).stat()
        if not stat.S_ISREG(state.st_mode):
            raise InvalidInput(f"the {what} {str(text)!r:.80} is not a file; pass the path of a file or its bytes")
        if state.st_size > MAX_BYTES:
            raise InvalidInput(f"the {what} {str(text)!r:.80} has {state.st_size} bytes and the limit is {MAX_BYTES}")
        return Path(text).read_bytes(), str(text)
    except InvalidInput:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidInput(f"the {what} {str(text)!r:.80} cannot be read: {reason}") from error


def _opened(data: bytes, name: str, max_pixels: int, mode: str) -> Any:
    image_module = pil()
    if not data:
        raise InvalidInput(f"{name} is empty; pass the content of an image file")
    try:
        image = image_module.open(io.BytesIO(data), formats=_formats())
    except (image_module.DecompressionBombError, image_module.DecompressionBombWarning) as error:
        raise InvalidInput(f"{name}: {_line(error)}; make the image smaller first") from error
    except image_module.UnidentifiedImageError as error:
        raise InvalidInput(
            f"{name} is not an image of a known format ({', '.join(_formats())}), or is damaged"
        ) from error
    except Exception as error:  # whatever a damaged header makes a decoder raise
        raise InvalidInput(f"{name} cannot be opened as an image: {_line(error)}") from error
    check_size(image.size, max_pixels)
    return _converted(_decoded(image, name), mode)


@lru_cache(maxsize=1)
def _formats() -> tuple[str, ...]:
    image_module = pil()
    image_module.init()
    return tuple(name for name in FORMATS if name in image_module.OPEN)


def _decoded(image: Any, name: str) -> Any:
    try:
        image.load()
    except Exception as error:  # truncated or damaged; decoders raise anything
        raise InvalidInput(f"{name} cannot be decoded; it is damaged or truncated: {_line(error)}") from error
    return image


def check_size(size: tuple[int, int], max_pixels: int, how: str = "has") -> None:
    """Raise InvalidInput for an image without pixels or with too many."""
    width, height = size
    if width < 1 or height < 1:
        raise InvalidInput(f"the image is {width}×{height} pixels; it must have at least 1×1")
    if width * height > max_pixels:
        raise InvalidInput(
            f"the image {how} {width}×{height} = {width * height} pixels and the limit is {max_pixels}; "
            "make it smaller, or pass a larger max_pixels=..."
        )


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__


# -- converting --------------------------------------------------------------------------------------------------------


def _converted(image: Any, mode: str) -> Any:
    """Upright, 8 bits per channel, in `mode`; transparency is dropped, as in Hugging Face."""
    if image.getexif().get(ORIENTATION, 1) != 1:
        from PIL import ImageOps

        image = ImageOps.exif_transpose(image)
    if image.mode == mode:
        return image
    if image.mode.startswith("I") or image.mode == "F":
        image = _in_8_bits(image)
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    try:
        return image.convert(mode)
    except Exception as error:
        raise InvalidInput(f"an image of mode {image.mode} cannot be converted to {mode}: {_line(error)}") from error


def _in_8_bits(image: Any) -> Any:
    """An image of 16 or 32 bits in 8. The range of 32 bits is ambiguous, so values must be in [0, 255]."""
    values = np.asarray(image)
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        values = values.astype(np.int64).clip(0, 65535)
        return pil().fromarray(((values + 128) // 257).astype(np.uint8))
    low, high = values.min(), values.max()
    if image.mode != "I" or low < 0 or high > 255:
        raise InvalidInput(
            f"an image of mode {image.mode} holds {low} to {high}, and its white level is unknown; "
            "convert it to 8 bits (mode L or RGB) or pass an array of floats in [0, 1]"
        )
    return pil().fromarray(values.astype(np.uint8))


def _of_array(array: np.ndarray, max_pixels: int) -> Any:
    shape = array.shape
    if array.ndim == 3 and shape[-1] not in (1, 3, 4) and shape[0] in (1, 3, 4):
        array = np.moveaxis(array, 0, -1)
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[-1] not in (1, 3, 4)):
        hint = "; pass several images as a list" if array.ndim == 4 else ""
        raise InvalidInput(f"an array of shape {list(shape)} is not an image: it must be [H, W] or [H, W, 1|3|4]{hint}")
    check_size((array.shape[1], array.shape[0]), max_pixels)
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[..., 0]
    return pil().fromarray(np.ascontiguousarray(_bytes_of(array)))


def _bytes_of(array: np.ndarray) -> np.ndarray:
    """The values of an array as uint8."""
    if array.dtype == np.uint8:
        return array
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255
    if array.dtype == np.uint16:
        return ((array.astype(np.int64) + 128) // 257).astype(np.uint8)
    floats = np.issubdtype(array.dtype, np.floating)
    if not floats and not np.issubdtype(array.dtype, np.integer):
        raise WrongType(
            f"an array of {array.dtype} is not an image; it must be integers in [0, 255] or floats in [0, 1]"
        )
    low, high, most = array.min(), array.max(), 1.0 if floats else 255
    if not (low >= 0 and high <= most):  # false for NaN too
        raise InvalidInput(f"an array of {array.dtype} holds {low} to {high}; an image's values must be in [0, {most}]")
    return np.rint(array * 255.0).astype(np.uint8) if floats else array.astype(np.uint8)


def is_cpu_tensor(value: Any) -> bool:
    """Whether `value` is a torch tensor in host memory."""
    from torch import Tensor

    return isinstance(value, Tensor) and value.device.type == "cpu"
