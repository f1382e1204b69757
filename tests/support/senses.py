"""Small random models that see and hear, with their processors, and images and recordings for them."""

from __future__ import annotations

import copy
import io
import wave
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from support import encoders

SIDE = 32
RATE = 16_000
TEXT: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
VISION: dict[str, Any] = {**TEXT, "image_size": SIDE, "patch_size": 8}


def images(count: int, *, seed: int = 0) -> list[Image.Image]:
    """Smooth images of different sizes."""
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        small = draw.integers(0, 256, (5, 6, 3), dtype=np.uint8)
        size = (int(draw.integers(20, 90)), int(draw.integers(20, 90)))
        found.append(Image.fromarray(small).resize(size, Image.Resampling.BICUBIC))
    return found


def saved(image: Image.Image, kind: str = "PNG", **more: Any) -> bytes:
    """The bytes of an image file."""
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


def tone(seconds: float, *, rate: int = RATE, seed: int = 0) -> np.ndarray:
    """A few sines and some noise, float32."""
    draw = np.random.default_rng(seed)
    t = np.arange(round(seconds * rate)) / rate
    found = 0.02 * draw.standard_normal(len(t))
    for hertz in draw.uniform(100, 3000, 4):
        found += draw.uniform(0.05, 0.2) * np.sin(2 * np.pi * hertz * t + draw.uniform(0, 6))
    return found.astype(np.float32)


def wav_file(samples: np.ndarray, rate: int = RATE) -> bytes:
    """A WAV file of 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return file.getvalue()


def same(mine: Any, other: Any, *, rel: float = 1e-4, abs: float = 1e-6, at: str = "result") -> None:
    """Both are the same but for float rounding, all the way down."""
    if isinstance(other, dict):
        assert set(mine) == set(other), at
        for key in other:
            same(mine[key], other[key], rel=rel, abs=abs, at=f"{at}.{key}")
    elif isinstance(other, (list, tuple)):
        assert len(mine) == len(other), at
        for i, (a, b) in enumerate(zip(mine, other)):
            same(a, b, rel=rel, abs=abs, at=f"{at}[{i}]")
    elif isinstance(other, (float, np.floating)):
        assert float(mine) == pytest.approx(float(other), rel=rel, abs=abs), at
    else:
        assert mine == other, at


def enliven(model: Any, *, scale: float = 0.3, seed: int = 0) -> Any:
    """The model with weights large enough that inputs matter."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, scale)
            elif "bias" in name:
                parameter.normal_(0, 0.1)
    return model.eval()


def processor(kind: str, **more: Any) -> Any:
    """An image processor of transformers that needs no torchvision, for images of SIDE pixels."""
    found = getattr(transformers, f"{kind}ImageProcessorPil", None) or getattr(transformers, f"{kind}ImageProcessor")
    return found(**more)


def square(kind: str, **more: Any) -> Any:
    return processor(kind, size={"height": SIDE, "width": SIDE}, **more)


# -- images ----------------------------------------------------------------------------------------------------------


def classifier(family: str, **more: Any) -> Any:
    """An image classifier of seven labels."""
    match family:
        case "vit" | "deit" | "dinov2":
            config = getattr(transformers, {"vit": "ViT", "deit": "DeiT", "dinov2": "Dinov2"}[family] + "Config")
            shape = VISION if family != "dinov2" else {**VISION, "mlp_ratio": 2}
        case "resnet":
            config, shape = transformers.ResNetConfig, {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
        case _:
            config = transformers.ConvNextConfig
            shape = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4}
    kind = config.__name__.removesuffix("Config")
    model = getattr(transformers, f"{kind}ForImageClassification")(config(**shape, **{"num_labels": 7, **more}))
    return enliven(model)


@cache
def clip() -> tuple[Any, Any, Any]:
    """CLIP, its image processor and its tokenizer."""
    words = encoders.tokenizer("roberta")
    text = {**TEXT, "vocab_size": len(words), "max_position_embeddings": 40, "eos_token_id": 2, "bos_token_id": 0}
    config = transformers.CLIPConfig(
        text_config={**text, "pad_token_id": 1}, vision_config=VISION, projection_dim=24, logit_scale_init_value=1.0
    )
    images = processor("CLIP", size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    return enliven(transformers.CLIPModel(config)), images, words


@cache
def siglip() -> tuple[Any, Any, Any]:
    """SigLIP, its image processor and a tokenizer that gives no mask, as SigLIP's does."""
    words = copy.deepcopy(encoders.tokenizer("roberta"))
    words.model_input_names = ["input_ids"]
    text = {**TEXT, "vocab_size": len(words), "max_position_embeddings": 64, "pad_token_id": 1}
    config = transformers.SiglipConfig(text_config=text, vision_config=VISION)
    model = enliven(transformers.SiglipModel(config))
    with torch.no_grad():
        model.logit_scale.fill_(0.5)
        model.logit_bias.fill_(-0.3)
    return model, square("Siglip"), words


@cache
def blip(head: str) -> tuple[Any, Any, Any]:
    """BLIP that writes captions (ForConditionalGeneration) or answers (ForQuestionAnswering)."""
    words = encoders.tokenizer("bert")
    ids = {"pad_token_id": 0, "bos_token_id": 2, "sep_token_id": 3, "eos_token_id": 3}
    text = {**TEXT, "vocab_size": len(words), "max_position_embeddings": 64, "encoder_hidden_size": 32, **ids}
    config = transformers.BlipConfig(text_config=text, vision_config=VISION)
    model = getattr(transformers, f"BlipFor{head}")(config)
    return enliven(model), square("Blip"), words


@cache
def vision_encoder_decoder() -> tuple[Any, Any, Any]:
    """ViT and GPT-2, as in the usual captioning models."""
    words = encoders.tokenizer("roberta")
    decoder = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=len(words), bos_token_id=0, eos_token_id=2,
        add_cross_attention=True,
    )  # fmt: skip
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.ViTConfig(**VISION), decoder
    )
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 0, 1, 2
    model = enliven(transformers.VisionEncoderDecoderModel(config=config))
    model.generation_config.decoder_start_token_id = 0
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 1, 2
    return model, square("ViT"), words


@cache
def git() -> tuple[Any, Any, Any]:
    """GIT, a decoder that reads an image ahead of its text."""
    words = encoders.tokenizer("bert")
    shape = {**TEXT, "vocab_size": len(words), "max_position_embeddings": 64}
    config = transformers.GitConfig(vision_config=VISION, **shape, pad_token_id=0, bos_token_id=2, eos_token_id=3)
    return enliven(transformers.GitForCausalLM(config)), square("CLIP", do_center_crop=False), words


@cache
def vilt() -> tuple[Any, Any, Any]:
    """ViLT with nine answers."""
    words = encoders.tokenizer("bert")
    shape = {**VISION, "vocab_size": len(words), "max_position_embeddings": 64, "num_labels": 9}
    model = transformers.ViltForQuestionAnswering(transformers.ViltConfig(**shape))
    return enliven(model), processor("Vilt", size={"shortest_edge": SIDE}, size_divisor=8), words


# -- recordings --------------------------------------------------------------------------------------------------------

LANGUAGES = ("en", "fr", "de")
CONV: dict[str, Any] = {
    "conv_dim": [16, 16, 16],
    "conv_kernel": [10, 5, 3],
    "conv_stride": [8, 5, 4],
    "num_feat_extract_layers": 3,
}


def wav2vec2(head: str, *, norm: str = "group", family: str = "Wav2Vec2", **more: Any) -> Any:
    """wav2vec2 or one of its kin with 160 samples a frame; `norm` is group or layer."""
    shape = {**TEXT, **CONV, "vocab_size": len(letters()), "feat_extract_norm": norm, "pad_token_id": 0}
    shape |= {"do_stable_layer_norm": norm == "layer", "conv_bias": norm == "layer", "classifier_proj_size": 16}
    shape |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    model = getattr(transformers, f"{family}For{head}")(getattr(transformers, f"{family}Config")(**shape, **more))
    return enliven(model)


def wave_extractor(*, mask: bool = False) -> Any:
    return transformers.Wav2Vec2FeatureExtractor(sampling_rate=RATE, return_attention_mask=mask, do_normalize=True)


@cache
def letters() -> Any:
    """The letters of a CTC model."""
    import json
    import tempfile
    from pathlib import Path

    names = ["<pad>", "<s>", "</s>", "<unk>", "|", *encoders.LETTERS]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocab.json"
        path.write_text(json.dumps({name: i for i, name in enumerate(names)}))
        return transformers.Wav2Vec2CTCTokenizer(str(path))


@cache
def whisper(*, languages: bool = False) -> tuple[Any, Any, Any]:
    """Whisper with a window of two seconds, its feature extractor and its tokenizer."""
    words, extractor = whisper_words(), transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=2)
    ids = {name: words.convert_tokens_to_ids(f"<|{name}|>") for name in (*LANGUAGES, "transcribe", "translate")}
    end, start = words.convert_tokens_to_ids("<|endoftext|>"), words.convert_tokens_to_ids("<|startoftranscript|>")
    config = transformers.WhisperConfig(
        vocab_size=len(words), num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_source_positions=100, max_target_positions=64, pad_token_id=end, bos_token_id=end, eos_token_id=end,
        decoder_start_token_id=start, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = enliven(transformers.WhisperForConditionalGeneration(config))
    known = model.generation_config
    known._from_model_config = False  # or it would be made anew when the model is loaded
    known.max_length, known.no_timestamps_token_id = 16, words.convert_tokens_to_ids("<|notimestamps|>")
    known.alignment_heads, known.is_multilingual = [[0, 1], [1, 2]], languages
    known.suppress_tokens = known.begin_suppress_tokens = None
    if languages:
        known.lang_to_id = {f"<|{name}|>": ids[name] for name in LANGUAGES}
        known.task_to_id = {name: ids[name] for name in ("transcribe", "translate")}
    return model, extractor, words


@cache
def whisper_words() -> Any:
    """Whisper's tokenizer over single letters, with times up to two seconds."""
    alphabet = ["Ġ", *encoders.LETTERS, *encoders.LETTERS.upper(), *"0123456789.,?!"]  # Ġ is a space
    special = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{name}|>" for name in LANGUAGES)]
    special += ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>"]
    special += ["<|notimestamps|>"]
    words = transformers.WhisperTokenizer(
        vocab={name: i for i, name in enumerate([*alphabet, *special])}, merges=[], extra_special_tokens=special[1:]
    )
    words.add_tokens([f"<|{i * 0.02:.2f}|>" for i in range(101)])
    return words
