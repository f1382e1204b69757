"""Repacked weights on disk: mapped the next time, and made again whenever they are not exactly what they should be."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest

import headway as hw
from headway.base.errors import InvalidInput
from headway.kernels.native.library import ThreadPool, open_library
from headway.models.quantized import cache as module
from headway.models.quantized.cache import MAGIC, WeightCache
from headway.models.quantized.cpu import QuantizedDecoder
from headway.models.weights.load import load_quantized_model
from support.gguf_files import write_gguf
from support.hf import random_hf, save_hf
from support.hf_families import family_model

pytestmark = pytest.mark.skipif(open_library().calls is None, reason=open_library().missing or "-")
POOL = ThreadPool(1) if open_library().calls is not None else None


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "LEAST", 1)
    return write_gguf(
        tmp_path / "model.gguf", random_hf("qwen2", 0, hidden_size=64, intermediate_size=96)[1], kind="Q4_1"
    )


@pytest.fixture
def cache(tmp_path: Path) -> WeightCache:
    return WeightCache(tmp_path / "weights", 1 << 30)


def load(model: Path, cache: WeightCache | None, **how: object) -> QuantizedDecoder:
    return load_quantized_model(model, thread_pool=POOL, cache=cache, **how)  # type: ignore[arg-type]


def stored(cache: WeightCache) -> Path:
    (path,) = cache.folder.glob("*.weights")
    return path


def assert_same(one: QuantizedDecoder, other: QuantizedDecoder) -> None:
    for a, b in zip(one.arrays(), other.arrays(), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    one.check()


def test_the_second_load_has_the_same_weights_without_repacking(
    model: Path, cache: WeightCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(model, cache)
    path = stored(cache)
    assert (path.stat().st_mode & 0o777, cache.folder.stat().st_mode & 0o777) == (0o600, 0o700)
    monkeypatch.setattr("headway.models.weights.load.load_matrix", None)
    again = load(model, cache)
    assert_same(again, first)
    assert (again.output is again.embedding) == (first.output is first.embedding)


@pytest.mark.parametrize("name", ["gpt-oss", "gpt2", "phi", "gemma3n", "gemma4-experts"])
def test_families_of_any_layers_are_kept(
    name: str, tmp_path: Path, cache: WeightCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts and sinks; positions and norms with biases; an output bias; what lies outside of layers that differ."""
    monkeypatch.setattr(module, "LEAST", 1)
    folder = save_hf(tmp_path / "model", family_model(name)[1])
    first = load(folder, cache, quantize="int8")
    monkeypatch.setattr("headway.models.weights.load.load_matrix", None)
    assert_same(load(folder, cache, quantize="int8"), first)


def test_a_folder_of_floats_is_kept_for_each_way_of_loading_it(
    tmp_path: Path, cache: WeightCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAST", 1)
    folder = save_hf(tmp_path / "model", random_hf("llama", 0)[1])
    ways = ({}, {"quantize": "int8"}, {"keep": False})
    first = [load(folder, cache, **way) for way in ways]
    assert len(list(cache.folder.glob("*.weights"))) == len(ways)
    for way, decoder in zip(ways, first, strict=True):
        assert_same(load(folder, cache, **way), decoder)


def broken(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    match how:
        case "a bit of the contents":
            data[-5000] ^= 16
        case "a bit of the header":
            data[len(MAGIC) + 100] ^= 1
        case "cut off":
            del data[-4096:]
        case "half a header":
            del data[len(MAGIC) + 60 :]
        case "empty":
            data.clear()
        case "another file":
            data[:] = b"GGUF" * 4096
        case "zeros at the end":
            data[-8192:] = bytes(8192)
    path.write_bytes(data)


DAMAGE = (
    "a bit of the contents", "a bit of the header", "cut off", "half a header", "empty", "another file",
    "zeros at the end",
)  # fmt: skip


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_made_again_with_a_sentence(
    model: Path, cache: WeightCache, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = load(model, cache)
    broken(stored(cache), how)
    with caplog.at_level(logging.WARNING, logger="headway"):
        assert_same(load(model, cache), first)
    assert "are made again" in caplog.text
    caplog.clear()
    assert_same(load(model, cache), first)
    assert not caplog.text  # it was replaced


def test_another_version_is_made_again(model: Path, cache: WeightCache, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(model, cache)
    old = stored(cache)
    monkeypatch.setattr(module, "VERSION", module.VERSION + 1)
    assert_same(load(model, cache), first)
    new = next(path for path in cache.folder.glob("*.weights") if path != old)
    new.write_bytes(old.read_bytes())  # as if two versions had one name
    assert_same(load(model, cache), first)


def test_another_time_or_header_is_another_model(tmp_path: Path, model: Path, cache: WeightCache) -> None:
    load(model, cache)
    about = model.stat()
    other = random_hf("qwen2", 0, hidden_size=64, intermediate_size=96, rms_norm_eps=0.125)[1]
    write_gguf(model, other, kind="Q4_1")
    os.utime(model, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert model.stat().st_size == about.st_size
    assert_same(load(model, cache), load(model, None))
    os.utime(model, ns=(about.st_atime_ns, about.st_mtime_ns + 10**9))
    load(model, cache)
    assert len(list(cache.folder.glob("*.weights"))) == 3


def test_a_folder_that_others_can_use_is_not_used(
    model: Path, cache: WeightCache, caplog: pytest.LogCaptureFixture
) -> None:
    cache.folder.mkdir()
    cache.folder.chmod(0o755)
    load(model, cache)
    assert not list(cache.folder.iterdir())
    assert "chmod 700" in caplog.text


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert load(model, WeightCache(tmp_path / "file" / "weights", 1 << 30)).config.layers
    assert "are not cached" in caplog.text


def test_a_full_disk_leaves_nothing_behind(
    model: Path, cache: WeightCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "replace", full)
    load(model, cache)
    assert not list(cache.folder.iterdir())
    assert "No space left" in caplog.text


def test_the_least_recently_used_makes_room(tmp_path: Path, model: Path, cache: WeightCache) -> None:
    load(model, cache)
    size = stored(cache).stat().st_size
    small = WeightCache(cache.folder, int(size * 1.5))
    second = tmp_path / "second.gguf"
    second.write_bytes(model.read_bytes())
    load(second, small)
    assert stored(small).stat().st_size == size
    load(model, WeightCache(tmp_path / "none", size // 2))
    assert not (tmp_path / "none").exists()


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.base.config import settings

    for text, size in (("off", 0), ("0", 0), ("64", 64 << 20), ("", 2 << 30)):
        monkeypatch.setenv("HEADWAY_WEIGHT_CACHE", text)
        assert settings().weight_cache == size
    monkeypatch.setenv("HEADWAY_WEIGHT_CACHE", "much")
    with pytest.raises(InvalidInput, match="HEADWAY_WEIGHT_CACHE is 'much'"):
        settings()


def test_an_engine_computes_the_same_from_the_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))

    def tokens() -> list[int]:
        with hw.Engine(model, threads=1, pages=8) as engine, engine.context() as context:
            return engine.run(_generate, context)

    assert tokens() == tokens()
    assert list((tmp_path / "cache" / "weights").glob("*.weights"))


async def _generate(engine: hw.Engine, context: hw.Context) -> list[int]:
    context.fill([1, 2, 3])
    return list(await context.generate(hw.Argmax(), max_tokens=5).tokens())
