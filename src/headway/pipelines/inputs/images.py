"""Pictures of any kind that users have, opened, checked and converted: `load_image` gives a PIL image of 8 bits.

Nothing is ever fetched from a network, and nothing is decoded before its size is known to be within the limit.
What a model wants of a picture is in `recipes`.
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
from headway.pipelines.inputs.tensors import is_tensor

MAX_PIXELS = 89_478_485  # a quarter of a gigabyte in RGB, where PIL begins to warn too
MAX_BYTES = 1 << 32  # of a file
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "ICO")  # none runs programs
WANTED = "a picture: a PIL image, a numpy array, bytes or the path of an image file"
ORIENTATION = 0x0112
_loading = threading.Lock()  # a file-backed PIL image that a user passes twice must not be read by two threads


def pil() -> Any:
    """PIL.Image, or an error that names the extra that brings it."""
    try:
        from PIL import Image
    except ImportError:
        raise Unsupported("pictures need Pillow, which is not installed: pip install 'headway[pipelines]'") from None
    return Image


def is_image(value: Any) -> bool:
    """Whether `value` is meant as one picture rather than as several."""
    if isinstance(value, (str, bytes, bytearray, memoryview, os.PathLike, Mapping, np.ndarray)):
        return True
    return isinstance(value, pil().Image) or is_tensor(value)


def load_image(item: Any, *, max_pixels: int = MAX_PIXELS, mode: str = "RGB") -> Any:
    """A PIL image of 8 bits a channel, upright, in `mode` (RGB or L); of an animation its first picture.

    Arrays are [H, W], [H, W, 1|3|4] or [1|3|4, H, W], whole numbers of 0 to 255 (uint16: to 65535) or floats of 0 to 1.
    """
    if isinstance(item, Mapping):
        item = _of_dict(item)
    if isinstance(item, pil().Image):
        check_size(item.size, max_pixels)
        with _loading:
            _decoded(item, "the picture")
        return _converted(item, mode)
    if isinstance(item, np.ndarray) or is_tensor(item):
        return _converted(_of_array(np.asarray(item), max_pixels), mode)
    if isinstance(item, (bytes, bytearray, memoryview)):
        return _opened(bytes(item), f"the {len(bytes(item))} bytes", max_pixels, mode)
    if isinstance(item, (str, os.PathLike)):
        return _opened(*_read(item), max_pixels, mode)
    raise WrongType(f"{item!r:.60} of type {type(item).__name__} was given where {WANTED} is wanted")


# -- opening -----------------------------------------------------------------------------------------------------------


def _of_dict(item: Mapping[str, Any]) -> Any:
    """The picture in {"image": ...}, or in {"bytes": ..., "path": ...} as datasets keep it."""
    if set(item) == {"image"}:
        return item["image"]
    if item and set(item) <= {"bytes", "path"}:
        return item["bytes"] if item.get("bytes") is not None else item.get("path")
    raise InvalidInput(f'a dict has the key "image", or "bytes" and "path"; {sorted(map(str, item))} were given')


def _read(path: str | os.PathLike[str]) -> tuple[bytes, str]:
    """The bytes that a path or a data: text stands for, and their name in words."""
    text = os.fspath(path)
    if isinstance(text, str) and text.startswith("data:"):
        head, _, body = text.partition(",")
        if not head.endswith(";base64"):
            raise InvalidInput(f"{head!r:.40} is no data:image/...;base64, text; pass bytes or a path")
        try:
            return base64.b64decode(body, validate=True), f"the data {head!r:.40}"
        except binascii.Error as error:
            raise InvalidInput(f"the text after {head!r:.40} is no base64: {error}") from error
    return read_file(path, "image")


def read_file(path: str | os.PathLike[str], what: str) -> tuple[bytes, str]:
    """The content of a local file and its name; addresses are refused, for nothing is fetched here."""
    text = os.fspath(path)
    scheme, found, _ = str(text).partition("://")
    if found and scheme.isalpha():
        raise InvalidInput(
            f"{str(text)!r:.80} is an address, and pipelines never use the network; "
            f"fetch the {what} first and pass its bytes or its path"
        )
    try:
        state = Path(text).stat()
        if not stat.S_ISREG(state.st_mode):
            raise InvalidInput(f"the {what} {str(text)!r:.80} is no file; pass the path of a file or its bytes")
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
        raise InvalidInput(f"{name} has nothing in it; pass the content of an image file")
    try:
        image = image_module.open(io.BytesIO(data), formats=_formats())
    except (image_module.DecompressionBombError, image_module.DecompressionBombWarning) as error:
        raise InvalidInput(f"{name}: {_line(error)}; make the picture smaller first") from error
    except image_module.UnidentifiedImageError as error:
        raise InvalidInput(f"{name} is no image of a known kind ({', '.join(_formats())}) or is damaged") from error
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
    except Exception as error:  # truncated or damaged, in whatever way its decoder says so
        raise InvalidInput(f"{name} cannot be decoded, it is damaged or cut off: {_line(error)}") from error
    return image


def check_size(size: tuple[int, int], max_pixels: int, how: str = "has") -> None:
    """Refuse a picture of no pixels or of too many."""
    width, height = size
    if width < 1 or height < 1:
        raise InvalidInput(f"the picture is {width}×{height} pixels; it needs at least one each way")
    if width * height > max_pixels:
        raise InvalidInput(
            f"the picture {how} {width}×{height} = {width * height} pixels and the limit is {max_pixels}; "
            "make it smaller, or pass max_pixels=... if it is meant to be that large"
        )


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__


# -- converting --------------------------------------------------------------------------------------------------------


def _converted(image: Any, mode: str) -> Any:
    """Upright, 8 bits a channel, in `mode`; transparency is dropped, as Hugging Face does."""
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
        raise InvalidInput(f"a picture of mode {image.mode} cannot be converted to {mode}: {_line(error)}") from error


def _in_8_bits(image: Any) -> Any:
    """A picture of 16 bits in 8. 32 bits can mean anything, so they must hold what 8 bits hold."""
    values = np.asarray(image)
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        values = values.astype(np.int64).clip(0, 65535)
        return pil().fromarray(((values + 128) // 257).astype(np.uint8))
    low, high = values.min(), values.max()
    if image.mode != "I" or low < 0 or high > 255:
        raise InvalidInput(
            f"a picture of mode {image.mode} holds {low} to {high}, and only its maker knows what is white; "
            "convert it to 8 bits (mode L or RGB) or pass an array of floats of 0 to 1"
        )
    return pil().fromarray(values.astype(np.uint8))


def _of_array(array: np.ndarray, max_pixels: int) -> Any:
    shape = array.shape
    if array.ndim == 3 and shape[-1] not in (1, 3, 4) and shape[0] in (1, 3, 4):
        array = np.moveaxis(array, 0, -1)
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[-1] not in (1, 3, 4)):
        hint = "; pass several pictures as a list" if array.ndim == 4 else ""
        raise InvalidInput(f"an array of shape {list(shape)} is no picture: [H, W] or [H, W, 1|3|4] is wanted{hint}")
    check_size((array.shape[1], array.shape[0]), max_pixels)
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[..., 0]
    return pil().fromarray(np.ascontiguousarray(_bytes_of(array)))


def _bytes_of(array: np.ndarray) -> np.ndarray:
    """The values of an array as 0 to 255."""
    if array.dtype == np.uint8:
        return array
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255
    if array.dtype == np.uint16:
        return ((array.astype(np.int64) + 128) // 257).astype(np.uint8)
    floats = np.issubdtype(array.dtype, np.floating)
    if not floats and not np.issubdtype(array.dtype, np.integer):
        raise WrongType(f"an array of {array.dtype} is no picture; whole numbers of 0 to 255 or floats of 0 to 1 are")
    low, high, most = array.min(), array.max(), 1.0 if floats else 255
    if not (low >= 0 and high <= most):  # false for NaN too
        raise InvalidInput(f"an array of {array.dtype} holds {low} to {high}; a picture's values lie in 0 to {most}")
    return np.rint(array * 255.0).astype(np.uint8) if floats else array.astype(np.uint8)
