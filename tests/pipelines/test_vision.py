"""Tasks over images give what transformers gives, and every kind of image is taken or refused in words."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image, PngImagePlugin

import headway as hw
from headway.base.errors import InvalidInput, Unsupported, UnsupportedModel, WrongType
from headway.pipelines.inputs.image_transforms import ImagePreprocessor, transform_of
from headway.pipelines.inputs.images import MAX_PIXELS, load_image
from support import senses
from support.senses import SIDE, same


def vit(**more: Any) -> hw.Pipeline:
    model = senses.classifier("vit", **more)
    return hw.pipeline("image-classification", model, image_processor=senses.square("ViT"), device="cpu")


# -- preparing ---------------------------------------------------------------------------------------------------------

PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViT", {"size": {"height": 33, "width": 30}}),
    "vit by the default": ("ViT", {}),
    "deit": ("DeiT", {"size": {"height": 40, "width": 40}, "crop_size": {"height": 32, "width": 32}}),
    "clip": ("CLIP", {"size": {"shortest_edge": 37}, "crop_size": {"height": 32, "width": 32}}),
    "clip that lacks pixels": ("CLIP", {"size": {"shortest_edge": 21}, "crop_size": {"height": 32, "width": 27}}),
    "clip as it comes": ("CLIP", {"do_resize": False, "crop_size": {"height": 30, "width": 30}}),
    "siglip": ("Siglip", {"size": {"height": 32, "width": 32}}),
    "blip": ("Blip", {"size": {"height": 24, "width": 24}, "resample": 0}),
    "bit": ("Bit", {"size": {"shortest_edge": 33}, "crop_size": {"height": 32, "width": 32}}),
    "convnext": ("ConvNext", {"size": {"shortest_edge": 32}}),
    "convnext at 384": ("ConvNext", {"size": {"shortest_edge": 384}}),
    "vilt": ("Vilt", {"size": {"shortest_edge": 32}, "size_divisor": 8}),
    "no normalizing": ("ViT", {"size": {"height": 16, "width": 16}, "do_normalize": False}),
    "no rescaling": ("ViT", {"size": {"height": 16, "width": 16}, "do_rescale": False}),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_pixels_are_the_processors_to_the_last_bit(name: str) -> None:
    kind, more = PROCESSORS[name]
    processor = senses.processor(kind, **more)
    preparer = ImagePreprocessor(processor)
    assert preparer.transform is not None, "computed here, not by calling the processor"
    for image in senses.images(6):
        want = processor(images=image, return_tensors="np")
        found = preparer.prepare(image)
        assert set(found) == set(want)
        np.testing.assert_array_equal(found["pixel_values"], want["pixel_values"][0])
        assert found["pixel_values"].dtype == np.float32


@pytest.mark.parametrize("kind", ["EfficientNet", "Beit", "Siglip2", "Levit"])
def test_processors_that_do_more_are_called(kind: str) -> None:
    processor = senses.processor(kind)
    assert transform_of(processor) is None
    image = senses.images(1)[0]
    found, want = ImagePreprocessor(processor).prepare(image), processor(images=image, return_tensors="np")
    for name in want:
        np.testing.assert_array_equal(found[name], want[name][0])


# -- tasks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["vit", "deit", "dinov2", "resnet", "convnext"])
def test_image_classification(family: str) -> None:
    model = senses.classifier(family)
    processor = senses.processor("ConvNext", size={"shortest_edge": SIDE})
    if family in ("vit", "deit", "dinov2"):
        processor = senses.square("ViT")
    images = senses.images(9)
    with hw.pipeline("image-classification", model, image_processor=processor, device="cpu") as mine:
        peer = transformers.pipeline("image-classification", model=model, image_processor=processor, device="cpu")
        same(mine(images), peer(images))
        same(mine(images[0], top_k=2), peer(images[0], top_k=2))
        same(mine(images[0], function_to_apply="sigmoid"), peer(images[0], function_to_apply="sigmoid"))
        assert len(mine(images[0], top_k=None)) == 7


def test_heads_of_other_kinds() -> None:
    for more in ({"num_labels": 1}, {"problem_type": "multi_label_classification"}):
        model, processor = senses.classifier("vit", **more), senses.square("ViT")
        with hw.pipeline("image-classification", model, image_processor=processor, device="cpu") as mine:
            peer = transformers.pipeline("image-classification", model=model, image_processor=processor, device="cpu")
            same(mine(senses.images(3)), peer(senses.images(3)))


@pytest.mark.parametrize("family", ["ViT", "Dinov2", "CLIPVision"])
def test_image_feature_extraction(family: str) -> None:
    config = getattr(transformers, f"{family}Config")(**senses.VISION)
    model = senses.enliven(getattr(transformers, f"{family}Model")(config))
    processor, images = senses.square("ViT"), senses.images(4)
    with hw.pipeline("image-feature-extraction", model, image_processor=processor, device="cpu") as mine:
        peer = transformers.pipeline("image-feature-extraction", model=model, image_processor=processor, device="cpu")
        np.testing.assert_allclose(mine(images), peer(images), rtol=2e-4, atol=2e-5)
        pooled = mine(images[0], pool=True, return_tensors=True)
        torch.testing.assert_close(pooled, torch.tensor(peer(images[0], pool=True)), rtol=2e-4, atol=2e-5)
        states = torch.tensor(mine(images[0]))[0]
        torch.testing.assert_close(torch.tensor(mine(images[0], pool="cls"))[0], states[0])
        torch.testing.assert_close(torch.tensor(mine(images[0], pool="mean"))[0], states.mean(0))
        length = torch.tensor(mine(images[0], pool="mean", normalize=True)).norm()
        assert float(length) == pytest.approx(1, abs=1e-5)


def test_image_embeds_of_two_towers() -> None:
    model, processor, _ = senses.clip()
    image = senses.images(1)[0]
    with hw.pipeline("image-feature-extraction", model, image_processor=processor, device="cpu") as mine:
        pixels = processor(images=image, return_tensors="pt").pixel_values
        with torch.no_grad():
            want = model.get_image_features(pixels)
            states = model.vision_model(pixels).last_hidden_state
        want = want if isinstance(want, torch.Tensor) else want.pooler_output
        np.testing.assert_allclose(mine(image, pool=True), want.numpy(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(mine(image), states.numpy(), rtol=1e-4, atol=1e-5)


def test_a_pooler_that_was_made_up_is_not_used(tmp_path: Path) -> None:
    model = senses.classifier("vit")  # classifiers are saved without a pooler
    model.save_pretrained(tmp_path)
    senses.square("ViT").save_pretrained(tmp_path)
    with hw.pipeline("image-feature-extraction", str(tmp_path), device="cpu") as mine:
        image = senses.images(1)[0]
        with pytest.raises(UnsupportedModel, match="no trained pooler"):
            mine(image, pool=True)
        assert np.asarray(mine(image, pool="cls")).shape == (1, 32)


def test_a_folder_is_enough(tmp_path: Path) -> None:
    model, processor = senses.classifier("vit"), senses.square("ViT")
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    image = senses.images(1)[0]
    with vit() as one, hw.pipeline("image-classification", str(tmp_path), device="cpu") as other:
        same(other(image), one(image))


# -- together ----------------------------------------------------------------------------------------------------------


def test_results_do_not_depend_on_batch_mates() -> None:
    model = senses.classifier("vit")
    processor = senses.processor("ViT", do_resize=False)  # images keep their sizes: several shapes in one batch
    model.config.image_size = SIDE
    draw = np.random.default_rng(1)
    images = [draw.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8) for _ in range(40)]
    with hw.pipeline("image-classification", model, image_processor=processor, device="cpu") as mine:
        together = mine(images)
        for image, found in zip(images, together):
            same(found, mine(image))
        assert mine.stats()["batches"] < 60


def test_pictures_of_different_sizes_in_one_batch() -> None:
    model = senses.classifier("resnet")  # takes any size
    processor = senses.processor("ViT", do_resize=False)
    images = senses.images(12) + senses.images(12)
    with hw.pipeline("image-classification", model, image_processor=processor, device="cpu") as mine:
        for image, found in zip(images, mine(images)):
            with torch.no_grad():
                logits = model(processor(images=image, return_tensors="pt").pixel_values).logits[0]
            want = logits.softmax(-1).sort(descending=True).values[:5].tolist()
            assert [one["score"] for one in found] == pytest.approx(want, rel=1e-4)


def test_streams_and_many_tasks() -> None:
    images = senses.images(70)
    with vit() as mine:
        want = mine(images)
        for found, one in zip(mine(image for image in images), want):
            same(found, one)

        async def ask() -> list[Any]:
            return list(await asyncio.gather(*(mine.submit(image) for image in images)))

        for found, one in zip(asyncio.run(ask()), want):
            same(found, one)


def test_one_file_passed_many_times_is_read_by_one_thread(tmp_path: Path) -> None:
    image = senses.images(1)[0].resize((400, 300))
    image.save(tmp_path / "image.png")
    with vit() as mine, Image.open(tmp_path / "image.png") as opened:
        want = mine(image)
        for found in mine([opened] * 64):
            same(found, want)


def test_forward_by_hand() -> None:
    with vit() as mine:
        image = senses.images(1)[0]
        output = mine.forward(image, output_hidden_states=True, labels=[3])
        assert output.loss > 0
        assert len(output.hidden_states) == 3
        same(mine.postprocess(image, output), mine(image))


def test_int8_says_what_it_changed() -> None:
    model = senses.classifier("vit")
    with hw.pipeline(
        "image-classification", model, image_processor=senses.square("ViT"), device="cpu", quantize="int8"
    ) as mine:
        assert mine.quantization.cosine > 0.9
        assert mine(senses.images(1)[0])


# -- what may be given -------------------------------------------------------------------------------------------------


def test_every_way_to_give_a_picture(tmp_path: Path) -> None:
    image = senses.images(1)[0]
    path = tmp_path / "image.png"
    path.write_bytes(senses.saved(image))
    array = np.asarray(image)
    text = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    given = [
        image,
        array,
        np.moveaxis(array, -1, 0),
        torch.from_numpy(array.copy()),
        array.astype(np.int64),
        array / 255.0,
        array.astype(np.uint16) * 257,
        path,
        str(path),
        path.read_bytes(),
        bytearray(path.read_bytes()),
        text,
        {"image": image},
        {"bytes": path.read_bytes(), "path": None},
        {"bytes": None, "path": str(path)},
    ]
    with vit() as mine:
        want = mine(image)
        for one in mine(given):
            same(one, want)
        for one in given:
            same(mine(one), want)


@pytest.mark.parametrize("mode", ["RGBA", "L", "LA", "P", "1", "CMYK", "YCbCr", "HSV", "PA"])
def test_modes_are_converted_as_transformers_does(mode: str) -> None:
    image = senses.images(1)[0]
    other = image.convert("P").convert("PA") if mode == "PA" else image.convert(mode)
    found = load_image(other)
    assert found.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(found), np.asarray(other.convert("RGB")))


def test_transparent_palettes_do_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    file = senses.saved(senses.images(1)[0].convert("P"), transparency=bytes(range(256)))
    assert load_image(file).mode == "RGB"
    assert not recwarn.list


def test_sixteen_bits_are_scaled() -> None:
    values = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    for given in (Image.fromarray(values), senses.saved(Image.fromarray(values)), values):
        found = np.asarray(load_image(given, mode="L")).astype(int)
        assert np.abs(found - values / 257).max() <= 0.5
    assert load_image(Image.fromarray(values)).mode == "RGB"


def test_numbers_without_a_white_are_refused() -> None:
    for image in (Image.fromarray(np.full((4, 4), 70000, dtype=np.int32)), Image.new("F", (4, 4), 0.5)):
        with pytest.raises(InvalidInput, match="its white level is unknown"):
            load_image(image)
    assert load_image(Image.fromarray(np.full((4, 4), 200, dtype=np.int32))).getpixel((0, 0)) == (200, 200, 200)


def test_pictures_are_turned_upright() -> None:
    image = senses.images(1)[0]
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = load_image(senses.saved(image, "PNG", exif=exif))
    np.testing.assert_array_equal(np.asarray(turned), np.asarray(image.transpose(Image.Transpose.ROTATE_270)))


def test_models_of_one_channel() -> None:
    model = senses.classifier("vit", num_channels=1)
    processor = senses.square("ViT", image_mean=[0.5], image_std=[0.5])
    with hw.pipeline("image-classification", model, image_processor=processor, device="cpu") as mine:
        image = senses.images(1)[0]
        same(mine(image), mine(image.convert("L")))


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (None, "expected an image.*got None"),
        (3.5, "got 3.5 .float."),
        ("https://example.com/cat.png", "is a URL, and pipelines never use the network; download the image first"),
        ("file:///tmp/cat.png", "is a URL"),
        ("no/such/file.png", "the image 'no/such/file.png' cannot be read: No such file"),
        ("data:image/png,abc", "is not a data:image/...;base64, URL"),
        ("data:image/png;base64,####", "is not valid base64"),
        ("/dev/zero", "the image '/dev/zero' is not a file"),
        ("/", "the image '/' is not a file"),
        (b"", "the 0 bytes is empty"),
        (b"not an image at all", "the 19 bytes is not an image of a known format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not an image of a known format"),
        (np.zeros((0, 4, 3), dtype=np.uint8), "is 4×0 pixels; it must have at least"),
        (np.zeros((2, 3, 4, 3), dtype=np.uint8), "pass several images as a list"),
        (np.zeros((5, 5, 2), dtype=np.uint8), r"an array of shape \[5, 5, 2\] is not an image"),
        (np.full((4, 4), np.nan), "holds nan to nan; an image's values must be in .0, 1.0"),
        (np.full((4, 4), 7.0), "holds 7.0 to 7.0; an image's values must be in .0, 1.0"),
        (np.full((4, 4), -1), "holds -1 to -1; an image's values must be in .0, 255"),
        (np.full((4, 4), "x"), "an array of <U1 is not an image"),
        (Image.new("RGB", (0, 5)), "is 0×5 pixels"),
        ({}, 'a dict must have the key "image"'),
        ({"photo": 1}, r"a dict must have the key .image., or .bytes. and .path., not \[.photo.\]"),
        ({"bytes": None, "path": None}, "got None"),
    ],
)
def test_bad_pictures_are_refused_in_words(item: Any, words: str) -> None:
    with vit() as mine:
        with pytest.raises((InvalidInput, WrongType), match=words):
            mine(item)
        with pytest.raises((InvalidInput, WrongType), match=f"item 1: .*{words}"):
            mine([senses.images(1)[0], item])


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_damaged_files_are_refused(kind: str) -> None:
    whole = senses.saved(senses.images(1)[0].resize((200, 200)), kind)
    assert load_image(whole).size == (200, 200)
    draw = np.random.default_rng(0)
    for _ in range(30):
        end = int(draw.integers(1, len(whole) * 3 // 4))
        with pytest.raises(InvalidInput, match=r"bytes (is not an image|cannot be)"):
            load_image(whole[:end])
    for _ in range(100):  # a changed byte may still be an image, but nothing else may happen
        broken = bytearray(whole)
        broken[int(draw.integers(len(whole)))] = int(draw.integers(256))
        with contextlib.suppress(InvalidInput):
            assert load_image(bytes(broken), max_pixels=10**6).mode == "RGB"


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is huge."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_huge_pictures_are_refused_before_they_are_decoded() -> None:
    with pytest.raises(InvalidInput, match=f"10000×10000 = 100000000 pixels and the limit is {MAX_PIXELS}"):
        load_image(bomb(10_000, 10_000))
    with pytest.raises(InvalidInput, match="make the image smaller first"):
        load_image(bomb(100_000, 100_000))
    with vit() as mine:
        with pytest.raises(InvalidInput, match=r"pass a larger max_pixels"):
            mine(np.zeros((40, 50, 3), dtype=np.uint8), max_pixels=1999)
        assert mine(np.zeros((40, 50, 3), dtype=np.uint8), max_pixels=2000)
        with pytest.raises(InvalidInput, match="max_pixels is 0"):
            mine(np.zeros((4, 5, 3), dtype=np.uint8), max_pixels=0)


def test_a_thin_picture_does_not_grow_without_limit() -> None:
    preparer = ImagePreprocessor(senses.processor("CLIP"))
    with pytest.raises(InvalidInput, match="of 1×1000000, resized for the model, has 224×224000000"):
        preparer.prepare(np.zeros((1_000_000, 1, 3), dtype=np.uint8))


def test_texts_in_a_file_cannot_fill_memory() -> None:
    note = PngImagePlugin.PngInfo()
    note.add_text("x", "a" * 80_000_000, zip=True)
    with pytest.raises(InvalidInput, match="cannot be opened as an image"):
        load_image(senses.saved(senses.images(1)[0], pnginfo=note))


def test_options_are_checked() -> None:
    with vit() as mine:
        for given, words in [
            ({"top_k": 0}, "top_k is 0"),
            ({"function_to_apply": "max"}, "function_to_apply is 'max'"),
            ({"max_pixels": True}, "max_pixels is True"),
            ({"timeout": 0}, "timeout is 0; it must be a number of seconds above 0"),
            ({"colour": 3}, "'colour' is not an option of this task"),
        ]:
            with pytest.raises((InvalidInput, hw.WrongType), match=words):
                mine(senses.images(1)[0], **given)
    model = senses.enliven(transformers.ViTModel(transformers.ViTConfig(**senses.VISION)))
    with hw.pipeline("image-feature-extraction", model, image_processor=senses.square("ViT"), device="cpu") as mine:
        for given, words in [({"pool": "max"}, "pool is 'max'"), ({"normalize": True}, "normalize=True is for pooled")]:
            with pytest.raises(InvalidInput, match=words):
                mine(senses.images(1)[0], **given)


def test_what_a_processor_refuses_is_said() -> None:
    preparer = ImagePreprocessor(senses.processor("Levit", size={"height": 4, "width": 4}))
    preparer.processor.image_mean = "red"
    with pytest.raises(InvalidInput, match="rejects an image of 5×4"):
        preparer.prepare(np.zeros((4, 5, 3), dtype=np.uint8))


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(Unsupported, match=r"pip install 'headway\[pipelines\]'"):
        load_image(b"x")
