"""The inputs of a model from an image: what its image processor computes, with PIL and numpy alone.

An ImagePreprocessor computes bit for bit what the processor does, if that is a plain one (resize, crop, rescale,
normalize) that an ImageTransform describes; any other processor is called itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.pipelines.inputs.images import MAX_PIXELS, check_size, load_image

# processors that do nothing but resize, crop, rescale and normalize
PLAIN = ("ViT", "DeiT", "CLIP", "ChineseCLIP", "Siglip", "Blip", "Bit", "Pvt", "MobileNetV1", "ConvNext", "Vilt")


@dataclass(frozen=True)
class ImageTransform:
    """The steps of a plain image processor, in this order."""

    kind: str  # one of PLAIN
    size: tuple[int, int] | None  # resize to [height, width]
    shortest: int | None  # or resize the short side to this
    resample: int
    crop: tuple[int, int] | None  # the center [height, width]
    scale: float | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    crop_share: float = 224 / 256  # ConvNext below 384
    divisor: int = 32  # Vilt: both sides are multiples

    def target(self, width: int, height: int) -> tuple[int, int]:
        """[height, width] after resizing."""
        if self.size is not None:
            return self.size
        if self.shortest is None:
            return height, width
        if self.kind == "Vilt":
            return self._vilt(width, height)
        short = self.shortest
        if self.kind == "ConvNext":
            if short >= 384:
                return short, short
            short = int(short / self.crop_share)
        return (int(short * height / width), short) if width <= height else (short, int(short * width / height))

    def _vilt(self, width: int, height: int) -> tuple[int, int]:
        assert self.shortest is not None
        scale = self.shortest / min(height, width)
        h, w = (self.shortest, scale * width) if height < width else (scale * height, self.shortest)
        longest = int(1333 / 800 * self.shortest)
        if max(h, w) > longest:
            h, w = h * (longest / max(h, w)), w * (longest / max(h, w))
        return int(h + 0.5) // self.divisor * self.divisor, int(w + 0.5) // self.divisor * self.divisor

    def cropped(self) -> tuple[int, int] | None:
        """[height, width] of the center that is kept."""
        if self.kind == "ConvNext" and self.shortest is not None and self.shortest < 384:
            return self.shortest, self.shortest
        return self.crop


class ImagePreprocessor:
    """Images into a model's inputs: `prepare(item)` → name → array without a batch dimension."""

    def __init__(self, processor: Any, channels: int = 3) -> None:
        self.processor, self.mode = processor, "L" if channels == 1 else "RGB"
        self.transform = transform_of(processor)
        self._tables = None if self.transform is None else _tables(self.transform, channels)

    def prepare(self, item: Any, max_pixels: int = MAX_PIXELS) -> dict[str, np.ndarray]:
        """The model inputs of one image."""
        image = load_image(item, max_pixels=max_pixels, mode=self.mode)
        if self.transform is None:
            inputs = self._processed(image)
            return {name: np.asarray(value)[0] for name, value in inputs.items() if isinstance(value, np.ndarray)}
        pixels = self._pixels(image, self.transform, max_pixels)
        if self.transform.kind == "Vilt":
            return {"pixel_values": pixels, "pixel_mask": np.ones(pixels.shape[1:], dtype=np.int64)}
        return {"pixel_values": pixels}

    def _processed(self, image: Any) -> Any:
        try:
            return self.processor(images=image, return_tensors="np")
        except Exception as error:  # the model's own processor may raise anything
            kind, reason = type(self.processor).__name__, " ".join(str(error).split())[:160]
            raise InvalidInput(f"{kind} rejects an image of {image.size[0]}×{image.size[1]}: {reason}") from error

    def _pixels(self, image: Any, transform: ImageTransform, max_pixels: int) -> np.ndarray:
        """[C, H, W] in float32."""
        height, width = transform.target(*image.size)
        if (width, height) != image.size:
            check_size((width, height), max_pixels, f"of {image.size[0]}×{image.size[1]}, resized for the model, has")
            image = image.resize((width, height), resample=transform.resample)
        values = np.asarray(image)
        if (crop := transform.cropped()) is not None:
            values = _center_crop(values, *crop)
        if values.ndim == 2:
            values = values[..., None]
        assert self._tables is not None
        pixels = np.empty((values.shape[2], *values.shape[:2]), dtype=np.float32)
        for channel, table in enumerate(self._tables):
            np.take(table, values[..., channel], out=pixels[channel])
        return pixels


def transform_of(processor: Any) -> ImageTransform | None:
    """The steps of `processor`, if it is a plain one; None if it must be called itself."""
    kind = type(processor).__name__.removesuffix("Pil").removesuffix("Fast").removesuffix("FeatureExtractor")
    kind = kind.removesuffix("ImageProcessor")
    size = _sides(getattr(processor, "size", None)) if getattr(processor, "do_resize", False) else {}
    crop = _sides(getattr(processor, "crop_size", None)) if getattr(processor, "do_center_crop", False) else {}
    resample = getattr(processor, "resample", None)
    pads = kind != "Vilt" and getattr(processor, "do_pad", False)
    known = kind in PLAIN and set(size) in (set(), {"height", "width"}, {"shortest_edge"}) and not pads
    if not known or set(crop) not in (set(), {"height", "width"}) or not isinstance(resample, (int, type(None))):
        return None
    normal = getattr(processor, "do_normalize", False)
    return ImageTransform(
        kind=kind,
        size=(size["height"], size["width"]) if "height" in size else None,
        shortest=size.get("shortest_edge"),
        resample=2 if resample is None else int(resample),
        crop=(crop["height"], crop["width"]) if crop else None,
        scale=float(processor.rescale_factor) if getattr(processor, "do_rescale", False) else None,
        mean=_numbers(processor.image_mean) if normal else None,
        std=_numbers(processor.image_std) if normal else None,
        crop_share=float(getattr(processor, "crop_pct", None) or 224 / 256),
        divisor=int(getattr(processor, "size_divisor", None) or 32),
    )


def _sides(size: Any) -> dict[str, int]:
    if isinstance(size, int):
        return {"side": size}  # a form of old processors
    return {name: value for name, value in dict(size or {}).items() if value is not None}


def _numbers(values: Any) -> tuple[float, ...]:
    return tuple(map(float, values)) if hasattr(values, "__iter__") else (float(values),)


def _tables(transform: ImageTransform, channels: int) -> list[np.ndarray]:
    """A lookup table of the 256 values for each channel, rounded where the processor rounds."""
    values = np.arange(256, dtype=np.float64)
    scaled = (values * transform.scale if transform.scale is not None else values).astype(np.float32)
    if transform.mean is None or transform.std is None:
        return [scaled] * channels
    means, stds = _spread(transform.mean, channels), _spread(transform.std, channels)
    return [(scaled - np.float32(mean)) / np.float32(std) for mean, std in zip(means, stds)]


def _spread(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    if len(values) not in (1, channels):
        raise InvalidInput(f"the image processor has {len(values)} means or deviations for {channels} channels")
    return values * channels if len(values) == 1 else values


def _center_crop(values: np.ndarray, height: int, width: int) -> np.ndarray:
    """The center [height, width] of an array [H, W, …], padded with black."""
    h, w = values.shape[:2]
    if h < height or w < width:
        full = np.zeros((max(h, height), max(w, width), *values.shape[2:]), dtype=values.dtype)
        top, left = -(-(full.shape[0] - h) // 2), -(-(full.shape[1] - w) // 2)
        full[top : top + h, left : left + w] = values
        top, left = (h - height) // 2 + top, (w - width) // 2 + left
        values = full
    else:
        top, left = (h - height) // 2, (w - width) // 2
    return values[top : top + height, left : left + width]
