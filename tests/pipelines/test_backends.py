"""Other ways to compute the same: unpadded, int8, compiled, onnxruntime. Each is held against the plain model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import headway as hw
from headway.pipelines.backends.compiled import row_bucket, token_bucket
from headway.pipelines.backends.linear import (
    OneDnnLinear,
    QuantizedLinear,
    TorchInt8Linear,
    TorchLinear,
    has_onednn,
    int8_factory,
)
from headway.pipelines.backends.unpadded import FAMILIES, GroupedLayout, PerLengthAttention, can_unpad
from headway.pipelines.inputs.arrays import length_groups
from headway.pipelines.task import Row
from support import encoders, senses, writers

LENGTHS = (1, 3, 3, 3, 9, 9, 20)


def pipe(task: str, model: Any, family: str, **more: Any) -> hw.Pipeline:
    return hw.pipeline(task, model, tokenizer=encoders.tokenizer(family), device="cpu", **more)


def vectors(p: hw.Pipeline, texts: list[str]) -> np.ndarray:
    with p:
        return np.stack(p(texts))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    return tmp_path


class TestPacked:
    @pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "electra"])
    @pytest.mark.parametrize("act", ["gelu", "relu"])
    def test_gives_what_padded_rows_give(self, family: str, act: str) -> None:
        named = {"activation": act} if family == "distilbert" else {"hidden_act": act}
        model = encoders.model(family, "base", **named)
        texts = encoders.texts(40)
        unpadded = pipe("sentence-embedding", model, family, unpadded=True)
        assert unpadded.implementation.loaded.unpadded is not None
        padded = pipe("sentence-embedding", model, family, unpadded=False)
        assert padded.implementation.loaded.unpadded is None
        np.testing.assert_allclose(vectors(unpadded, texts), vectors(padded, texts), rtol=1e-4, atol=2e-6)

    def test_no_padding_is_computed(self) -> None:
        model = encoders.model("bert", "base")
        with pipe("sentence-embedding", model, "bert") as p:
            p(encoders.texts(50))
            assert p.stats()["padded_tokens"] == p.stats()["tokens"]

    def test_attention_by_length_is_attention_under_a_block_mask(self) -> None:
        torch.manual_seed(0)
        rows = [Row({}, length) for length in LENGTHS]
        qkv = torch.randn(sum(LENGTHS), 3 * 4 * 8)
        mask = torch.block_diag(*(torch.ones(n, n) for n in LENGTHS)).bool()
        q, k, v = qkv.view(-1, 3, 4, 8).permute(1, 2, 0, 3)
        want = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1).reshape(-1, 32)
        layout = GroupedLayout(length_groups(rows), qkv.device)
        torch.testing.assert_close(PerLengthAttention().all(qkv, layout, 4), want, rtol=1e-5, atol=1e-6)
        firsts = layout.cu_seqlens[:-1].long()
        one = PerLengthAttention().one(qkv[firsts, :32].contiguous(), qkv[:, 32:].contiguous(), layout, 4)
        torch.testing.assert_close(one, want[firsts], rtol=1e-5, atol=1e-6)
        assert layout.cu_seqlens.diff().tolist() == list(LENGTHS)

    def test_other_architectures_are_padded_unless_packed_was_demanded(self) -> None:
        model = encoders.model("deberta", "base")
        assert not can_unpad(model)
        with pipe("sentence-embedding", model, "deberta") as p:
            assert p.implementation.loaded.unpadded is None
        with pytest.raises(hw.Unsupported, match=r"deberta-v2 models support padded rows only"):
            pipe("sentence-embedding", model, "deberta", unpadded=True)

    def test_every_family_that_is_named_can_be_packed(self) -> None:
        for family in ("bert", "roberta", "distilbert", "electra"):
            assert can_unpad(encoders.model(family, "base"))
        assert set(FAMILIES) >= {"bert", "roberta", "distilbert", "electra"}
        assert not can_unpad(encoders.model("bert", "base", is_decoder=True))


class TestProducts:
    def test_blocked_products_are_plain_ones(self) -> None:
        torch.manual_seed(0)
        weight, bias, x, r = torch.randn(24, 16), torch.randn(24), torch.randn(9, 16), torch.randn(9, 24)
        assert has_onednn(weight)
        for b in (bias, None):
            plain, blocked = TorchLinear(weight, b), OneDnnLinear(weight, b)
            torch.testing.assert_close(blocked(x), plain(x), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(blocked.gelu(x), plain.gelu(x), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(blocked.plus(x, r), plain.plus(x, r), rtol=1e-5, atol=1e-5)

    def test_native_and_torch_int8_are_the_same_numbers(self) -> None:
        torch.manual_seed(0)
        weight, bias, x = torch.randn(48, 64), torch.randn(48), torch.randn(17, 64)
        native, reference = int8_factory(1)(weight, bias), TorchInt8Linear(weight, bias)
        torch.testing.assert_close(native(x), reference(x), rtol=1e-4, atol=2e-4)
        assert float((reference(x) - TorchLinear(weight, bias)(x)).abs().max()) > 1e-3  # it really is 8 bits

    def test_a_row_does_not_depend_on_its_neighbors(self) -> None:
        torch.manual_seed(0)
        product = int8_factory(1)(torch.randn(48, 64), None)
        x = torch.randn(5, 64)
        loud = torch.cat([x, 1000 * torch.randn(3, 64)])
        torch.testing.assert_close(product(loud)[:5], product(x), rtol=1e-6, atol=1e-6)


class TestInt8:
    @pytest.mark.parametrize("family", ["bert", "deberta"])
    def test_is_near_the_float_model_and_says_how_near(self, family: str) -> None:
        model = encoders.model(family, "base")
        texts = encoders.texts(20)
        with pipe("sentence-embedding", model, family, quantize="int8") as p:
            report = p.quantization
            got = np.stack(p(texts))
        assert report.layers >= 12
        assert report.bytes_after < report.bytes_before
        assert 0 < report.relative_error < 0.3
        assert 0.9 < report.cosine < 1
        want = vectors(pipe("sentence-embedding", model, family), texts)
        assert ((got * want).sum(1) > 0.95).all()
        assert not np.allclose(got, want, atol=1e-6)

    def test_layers_that_stay_in_floats_are_named(self) -> None:
        with pipe("text-classification", encoders.model("bert", "classify"), "bert", quantize="int8") as p:
            assert p.quantization.left == ("bert.pooler.dense", "classifier")
        for family, left in (("t5", ("lm_head",)), ("bart", ("lm_head",))):
            model = writers.model(family)
            with hw.pipeline(
                "translation", model, tokenizer=writers.tokenizer(), device="cpu", quantize="int8", max_new_tokens=4
            ) as p:
                assert p.quantization.left == left
                assert p.quantization.cosine > 0.9
                assert set(p("the film")[0]) == {"translation_text"}

    def test_the_callers_model_stays_as_it_is(self) -> None:
        model = encoders.model("bert", "classify", num_labels=2)
        pipe("text-classification", model, "bert", quantize="int8").close()
        assert not any(isinstance(part, QuantizedLinear) for part in model.modules())

    def test_packed_and_padded_give_the_same(self) -> None:
        model, texts = encoders.model("bert", "base"), encoders.texts(20)
        found = [
            vectors(pipe("sentence-embedding", model, "bert", quantize="int8", unpadded=p), texts)
            for p in (True, False)
        ]
        np.testing.assert_allclose(found[0], found[1], rtol=1e-3, atol=2e-3)

    def test_only_float32_on_a_cpu(self) -> None:
        with pytest.raises(hw.Unsupported, match=r"float32 on a CPU, not cpu bfloat16"):
            pipe("sentence-embedding", encoders.model("bert", "base"), "bert", quantize="int8", dtype="bfloat16")
        with pytest.raises(hw.InvalidInput, match=r"quantize is 'int4'; it must be None or 'int8'"):
            pipe("sentence-embedding", encoders.model("bert", "base"), "bert", quantize="int4")


class TestOnnx:
    def test_same_numbers_exported_once(self, cache: Path) -> None:
        model, texts = encoders.model("bert", "classify", num_labels=3), encoders.texts(30)
        with pipe("text-classification", model, "bert") as plain:
            want = plain(texts, top_k=None)
        for _ in range(2):
            with pipe("text-classification", model, "bert", backend="onnxruntime") as p:
                got = p(texts, top_k=None)
                with pytest.raises(hw.InvalidInput, match=r"takes .* and nothing else"):
                    p.forward("the film", output_hidden_states=True)
            for mine, other in zip(got, want):
                assert [one["label"] for one in mine] == [one["label"] for one in other]
                assert [o["score"] for o in mine] == pytest.approx([o["score"] for o in other], rel=1e-4)
        assert len(list((cache / "pipelines/onnx").glob("*/model.onnx"))) == 1

    def test_states_by_token_and_other_weights_are_another_export(self, cache: Path) -> None:
        texts = encoders.texts(12)
        for seed in (0, 1):
            model = encoders.model("distilbert", "base", seed=seed)
            got = vectors(pipe("sentence-embedding", model, "distilbert", backend="onnxruntime"), texts)
            want = vectors(pipe("sentence-embedding", model, "distilbert"), texts)
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)
        assert len(list((cache / "pipelines/onnx").glob("*/model.onnx"))) == 2

    def test_pictures_are_exported_too_and_other_shapes_are_refused(self, cache: Path) -> None:
        model, images = senses.classifier("vit"), senses.images(5)
        given = {"image_processor": senses.square("ViT"), "device": "cpu"}
        with hw.pipeline("image-classification", model, **given) as p:
            want = p(images)
        with hw.pipeline("image-classification", model, **given, backend="onnxruntime") as p:
            senses.same(p(images), want)
            with pytest.raises(hw.InvalidInput, match=r"pixel_values is \[1, 3, 8, 8\] and the model was exported for"):
                p.forward({"pixel_values": torch.zeros(1, 3, 8, 8)})
        with hw.pipeline("image-feature-extraction", model.vit, **given) as p:
            want = p(images[0])
        with hw.pipeline("image-feature-extraction", model.vit, **given, backend="onnxruntime") as p:
            senses.same(p(images[0]), want, abs=1e-5)

    @pytest.mark.parametrize("norm", ["group", "layer"])
    def test_speech_is_exported_for_any_length(self, cache: Path, norm: str) -> None:
        model, waves = senses.wav2vec2("CTC", norm=norm), [senses.tone(0.4 + 0.3 * i, seed=i) for i in range(4)]
        given = {"feature_extractor": senses.wave_extractor(), "tokenizer": senses.letters(), "device": "cpu"}
        with hw.pipeline("automatic-speech-recognition", model, **given) as p:
            want = p(waves)
        with hw.pipeline("automatic-speech-recognition", model, **given, backend="onnxruntime") as p:
            assert p(waves) == want

    @pytest.mark.parametrize("task", ["question-answering", "token-classification", "fill-mask"])
    def test_every_kind_of_head_over_texts(self, cache: Path, task: str) -> None:
        head = {"question-answering": "answer", "token-classification": "tag", "fill-mask": "fill"}[task]
        texts = encoders.texts(6)
        items: list[Any] = [{"question": "who", "context": text} for text in texts]
        if task != "question-answering":
            items = [f"{text} [MASK]" for text in texts]
        model = encoders.model("bert", head)
        with pipe(task, model, "bert") as p:
            want = p(items)
        with pipe(task, model, "bert", backend="onnxruntime") as p:
            senses.same(p(items), want, rel=1e-3)


class TestCompiled:
    def test_buckets(self) -> None:
        assert [token_bucket(n, 512) for n in (1, 16, 17, 64, 65, 128, 129, 500)] == [16, 16, 32, 64, 96, 128, 192, 512]
        assert token_bucket(60, 62) == 62
        assert [row_bucket(n) for n in (1, 2, 8, 9, 200, 257)] == [1, 8, 8, 32, 256, 512]

    @pytest.mark.slow
    def test_gives_what_the_plain_model_gives(self) -> None:
        model, texts = encoders.model("bert", "classify", num_labels=3), encoders.texts(20)
        with pipe("text-classification", model, "bert") as plain:
            want = plain(texts)
        with pipe("text-classification", model, "bert", compile=True) as p:
            got = p(texts)
        assert [one["label"] for one in got] == [one["label"] for one in want]
        assert [one["score"] for one in got] == pytest.approx([one["score"] for one in want], rel=1e-4)

    @pytest.mark.slow
    def test_pictures_and_recordings_are_compiled_for_their_shapes(self) -> None:
        images = senses.images(5)
        given: dict[str, Any] = {"image_processor": senses.square("ViT"), "device": "cpu"}
        with hw.pipeline("image-classification", senses.classifier("vit"), **given) as plain:
            want = plain(images)
        with hw.pipeline("image-classification", senses.classifier("vit"), **given, compile=True) as p:
            senses.same(p(images), want)
            senses.same(p(images[0]), want[0])
        waves = [senses.tone(0.4 + 0.3 * i, seed=i) for i in range(4)]
        given = {"feature_extractor": senses.wave_extractor(), "device": "cpu"}
        model = senses.wav2vec2("SequenceClassification", num_labels=4)
        with hw.pipeline("audio-classification", model, **given) as plain:
            want = plain(waves)
        with hw.pipeline("audio-classification", model, **given, compile=True) as p:
            senses.same(p(waves), want, rel=1e-3)


SEVERAL: dict[str, tuple[Any, str]] = {
    "summarization": (lambda: {"model": writers.model("t5"), "tokenizer": writers.tokenizer()}, "token by token"),
    "image-to-text": (lambda: _seeing(senses.git()), "token by token"),
    "visual-question-answering": (lambda: _seeing(senses.vilt()), "samples which patches"),
    "zero-shot-image-classification": (lambda: _seeing(senses.clip()), "separate parts"),
    "image-feature-extraction": (lambda: _seeing(senses.clip()), "only a part of its model"),
    "automatic-speech-recognition": (lambda: _hearing(senses.whisper()), "token by token"),
}


def _seeing(made: tuple[Any, Any, Any]) -> dict[str, Any]:
    return dict(zip(("model", "image_processor", "tokenizer"), made))


def _hearing(made: tuple[Any, Any, Any]) -> dict[str, Any]:
    return dict(zip(("model", "feature_extractor", "tokenizer"), made))


@pytest.mark.parametrize("asked", [{"compile": True}, {"backend": "onnxruntime"}])
@pytest.mark.parametrize("task", SEVERAL)
def test_models_of_several_passes_refuse_to_be_compiled_or_exported(task: str, asked: dict[str, Any]) -> None:
    make, reason = SEVERAL[task]
    words = "compile=True" if "compile" in asked else "backend='onnxruntime'"
    with pytest.raises(hw.Unsupported, match=f"{words} is for single-pass tasks, and {task} is not one: .*{reason}"):
        hw.pipeline(task, **make(), device="cpu", **asked)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"quantize": "int8", "backend": "onnxruntime"}, "choose one"),
        ({"compile": True, "backend": "onnxruntime"}, "choose compile"),
        ({"unpadded": True, "compile": True}, "padded rows only"),
        ({"device": "tpu"}, r"'tpu' is not supported: there is no TPU backend"),
        ({"device": "tensorrt"}, r"'tensorrt' is not supported: there is no TensorRT"),
    ],
)
def test_what_cannot_go_together_is_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(hw.Unsupported, match=words):
        hw.pipeline(
            "sentence-embedding",
            encoders.model("bert", "base"),
            tokenizer=encoders.tokenizer("bert"),
            **({"device": "cpu"} | more),
        )


def test_the_backend_tensorrt_is_refused_by_name() -> None:
    with pytest.raises(hw.InvalidInput, match="there is no TensorRT backend"):
        hw.pipeline("sentence-embedding", backend="tensorrt")


@pytest.mark.parametrize("dtype", ["bfloat16", "autocast", "autocast:float16"])
def test_other_dtypes_are_near_float32(dtype: str) -> None:
    model, texts = encoders.model("bert", "base"), encoders.texts(10)
    got = vectors(pipe("sentence-embedding", model, "bert", dtype=dtype), texts)
    want = vectors(pipe("sentence-embedding", model, "bert"), texts)
    assert got.dtype == np.float32
    assert ((got * want).sum(1) > 0.99).all()
    assert next(model.parameters()).dtype == torch.float32  # the caller's model stays as it is


def test_the_benchmark_counts_overlapping_kernels_once() -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    try:
        from pipelines import covered  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    assert covered([(0, 10), (2, 5), (8, 12), (20, 21)]) == 13
    assert covered([]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["minilm", "random"])
def test_the_benchmark_runs_and_compares_the_same_model(tmp_path: Path, model: str) -> None:
    command = [sys.executable, "benchmarks/pipelines.py", "--quick", "--model", model, "--out", str(tmp_path)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], text=True, capture_output=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "pipelines.json").read_text())
    assert {row["work"] for row in data["results"]} == {"(a) short", "(b) long-tailed", "(c) 8 tasks"}
    assert all(row["items/s"] > 0 for row in data["results"])
    assert any(note.startswith("32 of 32 labels as Hugging Face's") for note in data["notes"])
