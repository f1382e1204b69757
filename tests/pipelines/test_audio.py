"""Tasks over recordings give what transformers gives, and every kind of recording is taken or refused in words."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import headway as hw
from headway.base.errors import InvalidInput, Unsupported, UnsupportedModel, WrongType
from headway.pipelines.inputs.audio import load_audio, parse_wav, resample
from support import encoders, senses
from support.senses import RATE, same, tone
from support.sweeps import swept

SHORT = [tone(seconds, seed=i) for i, seconds in enumerate((0.7, 1.5, 2.0, 1.1, 0.7))]
LONG = [tone(seconds, seed=i) for i, seconds in enumerate((3.7, 5.3))]


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """transformers warns of what random models write."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def pair(task: Any, model: Any, extractor: Any, words: Any = None) -> tuple[hw.Pipeline, Any]:
    """Headway's pipeline and transformers' over the same model."""
    mine = hw.pipeline(task, model, feature_extractor=extractor, tokenizer=words, device="cpu")
    return mine, transformers.pipeline(
        task, model=model, feature_extractor=extractor, tokenizer=words, device="cpu", ignore_warning=True
    ) if words else transformers.pipeline(task, model=model, feature_extractor=extractor, device="cpu")


def one_by_one(peer: Any, items: list[np.ndarray], **more: Any) -> list[Any]:
    return [peer(item.copy(), **more) for item in items]


# -- a letter for every frame ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["group", "layer"])
@pytest.mark.parametrize("family", ["Wav2Vec2", "Hubert", "WavLM"])
def test_ctc_is_transformers_pipeline(family: str, norm: str) -> None:
    model = senses.wav2vec2("CTC", norm=norm, family=family)
    mine, peer = pair(
        "automatic-speech-recognition", model, senses.wave_extractor(mask=norm == "layer"), senses.letters()
    )
    with mine:
        found = mine(SHORT)
        same(found, one_by_one(peer, SHORT))
        assert len({one["text"] for one in found}) == len(SHORT)
        if family == "Wav2Vec2":
            for unit in ("char", "word"):
                same(mine(SHORT[:2], return_timestamps=unit), one_by_one(peer, SHORT[:2], return_timestamps=unit))
            for more in ({"chunk_length_s": 1}, {"chunk_length_s": 2, "stride_length_s": (0.5, 0.2)}):
                same(mine(LONG, **more), one_by_one(peer, LONG, **more))
                unit = {**more, "return_timestamps": "word"}
                same(mine(LONG[0], **unit), peer(LONG[0].copy(), **unit))


def test_lengths_share_a_batch_only_where_nothing_changes() -> None:
    for norm, shares in (("group", False), ("layer", True)):
        model = senses.wav2vec2("CTC", norm=norm)
        mine, _ = pair("automatic-speech-recognition", model, senses.wave_extractor(), senses.letters())
        waves = [tone(0.5 + 0.01 * i, seed=i) for i in range(24)]
        with mine:
            together = mine.forward(mine.preprocess(waves)) if shares else None
            for i, wave_ in enumerate(waves):
                alone = mine.forward(wave_).logits[0]
                if together is not None:
                    torch.testing.assert_close(together.logits[i, : len(alone)], alone, rtol=1e-3, atol=1e-4)
            assert mine(waves) == [mine(one) for one in waves]
            if not shares:
                with pytest.raises(InvalidInput, match="cannot share a batch"):
                    mine.preprocess(waves)


# -- Whisper -----------------------------------------------------------------------------------------------------------

WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    "text": (False, {}),
    "times of segments": (False, {"return_timestamps": True}),
    "times of words": (False, {"return_timestamps": "word"}),
    "one window after the other": (True, {"return_timestamps": True}),
    "pieces with times": (True, {"chunk_length_s": 1.5, "stride_length_s": (0.2, 0.3), "return_timestamps": True}),
    "pieces": (True, {"chunk_length_s": 2}),
    "pieces with times of words": (True, {"chunk_length_s": 1.5, "return_timestamps": "word"}),
}


@pytest.mark.parametrize("way", swept(WAYS, 5))
def test_whisper_is_transformers_pipeline(way: str) -> None:
    long, more = WAYS[way]
    items = LONG if long else SHORT[:3]
    mine, peer = pair("automatic-speech-recognition", *senses.whisper())
    with mine:
        found = mine(items, num_beams=2, **more)
        same(found, one_by_one(peer, items, generate_kwargs={"num_beams": 2}, **more))
        assert ("chunks" in found[0]) == ("return_timestamps" in more)


def test_whisper_draws_and_searches_as_transformers_does() -> None:
    mine, peer = pair("automatic-speech-recognition", *senses.whisper())
    with mine:
        same(mine(SHORT[:2]), one_by_one(peer, SHORT[:2]))  # five beams where nobody says
        greedy = mine(SHORT, num_beams=1, max_new_tokens=9)
        same(greedy, one_by_one(peer, SHORT, generate_kwargs={"num_beams": 1, "max_new_tokens": 9}))
        drawn = mine(SHORT, do_sample=True, num_beams=1, seed=4, temperature=1.5)
        assert drawn == [mine(one, do_sample=True, num_beams=1, seed=4, temperature=1.5) for one in SHORT]
        assert drawn != mine(SHORT, do_sample=True, num_beams=1, seed=5, temperature=1.5)


def test_long_recordings_are_divided_without_being_asked() -> None:
    mine, peer = pair("automatic-speech-recognition", *senses.whisper())
    with mine:
        same(mine(LONG[0], num_beams=1), peer(LONG[0].copy(), chunk_length_s=2, generate_kwargs={"num_beams": 1}))
        assert mine.stats()["rows"] == 3
        with pytest.raises(InvalidInput, match=r"lasts 3.7 s and the model's window is 2 s"):
            mine(LONG[0], chunk_length_s=0)


def test_languages() -> None:
    mine, peer = pair("automatic-speech-recognition", *senses.whisper(languages=True))
    with mine:
        for more in ({}, {"language": "fr"}, {"language": "german", "task": "translate"}):
            given = {"num_beams": 1, **more}
            same(mine(SHORT[:3], **given), one_by_one(peer, SHORT[:3], generate_kwargs=given))
        said = mine(SHORT[:3], num_beams=1, return_language=True)
        same(said, one_by_one(peer, SHORT[:3], return_language=True, generate_kwargs={"num_beams": 1}))
        assert said[0]["chunks"][0]["language"] in ("english", "french", "german")
        assert mine(SHORT[0], num_beams=1, return_language=True, return_timestamps="word")["chunks"]


def test_a_folder_of_whisper_is_enough(tmp_path: Path) -> None:
    made = senses.whisper()
    for part in made:
        part.save_pretrained(tmp_path)
    mine, _ = pair("automatic-speech-recognition", *made)
    with mine, hw.pipeline("asr", str(tmp_path), device="cpu", num_beams=1) as other:
        assert other(SHORT[0]) == mine(SHORT[0], num_beams=1)


def test_speech_encoder_decoders() -> None:
    words = encoders.tokenizer("roberta")
    model = speech_to_text(len(words))
    mine, peer = pair("automatic-speech-recognition", model, senses.wave_extractor(), words)
    with mine:
        same(mine(SHORT, max_new_tokens=9), one_by_one(peer, SHORT, max_new_tokens=9))


def speech_to_text(vocab: int) -> Any:
    """wav2vec2 and GPT-2."""
    decoder = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=vocab, bos_token_id=0, eos_token_id=2,
        add_cross_attention=True,
    )  # fmt: skip
    encoder = senses.wav2vec2("CTC").config
    config = transformers.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model = senses.enliven(transformers.SpeechEncoderDecoderModel(config=config))
    known = model.generation_config
    known.decoder_start_token_id, known.pad_token_id, known.eos_token_id = 0, 1, 2
    return model


def test_speech_options_are_checked() -> None:
    mine, _ = pair("automatic-speech-recognition", *senses.whisper())
    with mine:
        for given, words in [
            ({"chunk_length_s": 3}, "chunk_length_s is 3 and the model's window is 2 s"),
            ({"chunk_length_s": -1}, "chunk_length_s is -1"),
            ({"stride_length_s": 1}, "chunk_length_s is not set; pass it too"),
            ({"chunk_length_s": 1, "stride_length_s": 0.5}, "must be longer than both strides"),
            ({"chunk_length_s": 1, "stride_length_s": (0.1, 0.1, 0.1)}, "or two: left and right"),
            ({"return_timestamps": "char"}, "Whisper takes True, False or 'word'"),
            ({"language": "fr"}, "is English-only"),
            ({"task": "sing"}, "task is 'sing'"),
            ({"num_return_sequences": 2, "num_beams": 2}, "a recording has one text"),
            ({"max_new_tokens": 64}, "decoder has 64 positions"),
            ({"generate_kwargs": 3}, "generate_kwargs is a int"),
            ({"max_seconds": float("nan")}, "max_seconds is nan"),
        ]:
            with pytest.raises((InvalidInput, WrongType), match=words):
                mine(SHORT[0], **given)
    ctc, _ = pair("automatic-speech-recognition", senses.wav2vec2("CTC"), senses.wave_extractor(), senses.letters())
    with ctc:
        with pytest.raises(InvalidInput, match="CTC models take 'char', 'word' or None"):
            ctc(SHORT[0], return_timestamps=True)
        with pytest.raises(InvalidInput, match="too short for this model with strides"):
            ctc(SHORT[0], chunk_length_s=0.001)


def test_models_without_times_or_speech_are_named() -> None:
    model, extractor, words = senses.whisper()
    model = copy.deepcopy(model)
    model.generation_config.alignment_heads = None
    mine, _ = pair("automatic-speech-recognition", model, extractor, words)
    with mine, pytest.raises(Unsupported, match="has no alignment_heads"):
        mine(SHORT[0], return_timestamps="word")
    with pytest.raises(UnsupportedModel, match="does not recognize speech"):
        hw.pipeline("asr", senses.classifier("vit"), feature_extractor=extractor, tokenizer=words, device="cpu")


# -- labels ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["group", "layer"])
@pytest.mark.parametrize("family", ["Wav2Vec2", "Hubert", "WavLM"])
def test_audio_classification(family: str, norm: str) -> None:
    model = senses.wav2vec2("SequenceClassification", norm=norm, family=family, num_labels=6)
    mine, peer = pair("audio-classification", model, senses.wave_extractor(mask=norm == "layer"))
    with mine:
        for k in (2, 6):
            same(mine(SHORT, top_k=k), one_by_one(peer, SHORT, top_k=k))
        same(mine(SHORT[0]), peer(SHORT[0].copy()))
        assert len(mine(SHORT[0], top_k=None)) == 6
        more = {"function_to_apply": "sigmoid", "top_k": 6}
        same(mine(SHORT[0], **more), peer(SHORT[0].copy(), **more))


def test_audio_classification_of_spectrograms() -> None:
    whisper = senses.whisper()[0].config
    config = transformers.WhisperConfig(**{**whisper.to_dict(), "num_labels": 4, "classifier_proj_size": 8})
    model = senses.enliven(transformers.WhisperForAudioClassification(config))
    mine, peer = pair("audio-classification", model, senses.whisper()[1])
    with mine:
        same(mine(SHORT, top_k=4), one_by_one(peer, SHORT, top_k=4))
    shape = {**senses.TEXT, "num_mel_bins": 16, "max_length": 64, "num_labels": 5}
    model = senses.enliven(transformers.ASTForAudioClassification(transformers.ASTConfig(**shape)))
    mine, peer = pair("audio-classification", model, transformers.ASTFeatureExtractor(num_mel_bins=16, max_length=64))
    with mine:
        same(mine(SHORT[:2], top_k=5), one_by_one(peer, SHORT[:2], top_k=5))


def test_other_ways_to_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    model = senses.wav2vec2("SequenceClassification", num_labels=4)  # drops parts of its states while it is trained
    mine, _ = pair("audio-classification", model, senses.wave_extractor())
    with mine:
        want = mine(SHORT[0])
        with hw.pipeline(
            "audio-classification", model, feature_extractor=senses.wave_extractor(), device="cpu", quantize="int8"
        ) as eight:
            assert eight.quantization.cosine > 0.9
            assert eight(SHORT[0]) != want
        pytest.importorskip("onnxruntime")
        with hw.pipeline(
            "audio-classification",
            model,
            feature_extractor=senses.wave_extractor(),
            device="cpu",
            backend="onnxruntime",
        ) as exported:
            same(exported(SHORT[0]), want)
        same(mine(SHORT[0]), want)


# -- what may be given -------------------------------------------------------------------------------------------------


def wav(values: np.ndarray, *, rate: int = RATE, kind: str = "i16") -> bytes:
    """A WAV file of [samples] or [samples, channels] in -1 to 1."""
    table = values[:, None] if values.ndim == 1 else values
    bits, codec = int(kind[1:]), 3 if kind[0] == "f" else 1
    match kind:
        case "f32" | "f64":
            data = table.astype(f"<f{bits // 8}").tobytes()
        case "i8":
            data = np.rint(table * 127 + 128).astype(np.uint8).tobytes()
        case "i24":
            whole = np.rint(table * (2**23 - 1)).astype("<i4")
            data = whole[..., None].view(np.uint8)[..., :3].tobytes()
        case _:
            data = np.rint(table * (2 ** (bits - 1) - 1)).astype(f"<i{bits // 8}").tobytes()
    width = table.shape[1] * bits // 8
    head = struct.pack("<HHIIHH", codec, table.shape[1], rate, rate * width, width, bits)
    chunks = b"fmt " + struct.pack("<I", len(head)) + head + b"LIST" + struct.pack("<I", 3) + b"abc\0"
    chunks += b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


@pytest.mark.parametrize(("kind", "step"), [("i8", 2**-7), ("i16", 2**-15), ("i24", 2**-23), ("i32", 2**-24)])
def test_whole_numbers_in_wav_files(kind: str, step: float) -> None:
    values = tone(0.1)
    found, rate = parse_wav(wav(values, kind=kind))
    assert rate == RATE
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, values, atol=2 * step)


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_floats_in_wav_files(kind: str) -> None:
    found, _ = parse_wav(wav(tone(0.1), kind=kind))
    np.testing.assert_array_equal(found, tone(0.1))


def test_wav_files_of_the_standard_library() -> None:
    values = np.rint(tone(0.2) * 30000).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(2)
        out.setsampwidth(2)
        out.setframerate(8000)
        out.writeframes(np.stack([values, values // 2], axis=1).tobytes())
    found, rate = parse_wav(file.getvalue())
    assert rate == 8000
    np.testing.assert_allclose(found, (values / 32768 + values // 2 / 32768) / 2, atol=1e-6)


def test_extensible_and_piped_wav_files() -> None:
    plain = wav(tone(0.1))
    at = plain.index(b"fmt ")
    extended = struct.pack("<HHIIHH", 0xFFFE, 1, RATE, RATE * 2, 2, 16) + struct.pack("<HHI", 22, 16, 4)
    extended += struct.pack("<H", 1) + bytes(14)
    data = plain[plain.index(b"data") :]
    made = plain[:at] + b"fmt " + struct.pack("<I", len(extended)) + extended + data
    np.testing.assert_array_equal(parse_wav(made)[0], parse_wav(plain)[0])
    place = plain.index(b"data") + 4
    piped = plain[:place] + b"\xff\xff\xff\xff" + plain[place + 4 :]
    np.testing.assert_array_equal(parse_wav(piped)[0], parse_wav(plain)[0])


def test_every_way_to_give_a_recording(tmp_path: Path) -> None:
    values = tone(0.8)
    path = tmp_path / "tone.wav"
    path.write_bytes(wav(values, kind="f32"))
    given = [
        values,
        values.astype(np.float64),
        torch.from_numpy(values),
        values[None],
        np.stack([values, values]),
        {"array": values, "sampling_rate": RATE},
        {"raw": values, "sampling_rate": RATE},
        {"array": values.tolist(), "sampling_rate": RATE, "path": None},
        path,
        str(path),
        path.read_bytes(),
        {"bytes": path.read_bytes(), "path": "x"},
        {"bytes": None, "path": str(path)},
    ]
    model = senses.wav2vec2("SequenceClassification", num_labels=4)
    mine, _ = pair("audio-classification", model, senses.wave_extractor())
    with mine:
        want = mine(values)
        for one in mine(given):
            same(one, want)
        for one in given:
            same(mine(one), want)


def test_whole_numbers_are_scaled() -> None:
    values = tone(0.1)
    for kind, most in ((np.int16, 2**15), (np.int32, 2**31)):
        found = load_audio((values.astype(np.float64) * most).astype(kind), RATE)
        np.testing.assert_allclose(found, values, atol=2 / 2**15)
    assert load_audio(np.array([0, 128, 255], dtype=np.uint8), RATE).tolist() == [-1.0, 0.0, 127 / 128]


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (None, "expected a recording.*got None"),
        (7, "got 7 .int."),
        ("https://example.com/a.wav", "is a URL, and pipelines never use the network; download the recording"),
        ("no/such.wav", "the recording 'no/such.wav' cannot be read: No such file"),
        (b"", "the 0 bytes is not a WAV file; convert it first"),
        (b"\x1aE\xdf\xa3" + bytes(40), "is WebM, which is not supported; convert it first"),
        (b"RIFF\x04\0\0\0WAVE", "is a WAV file without a format"),
        (wav(tone(0.1))[:900], "is truncated: its b'data' has 3200 bytes, and 8"),
        (wav(tone(0.1)).replace(b"fmt \x10\0\0\0\x01\0", b"fmt \x10\0\0\0\x07\0"), "holds µ-law of 16 bits"),
        (wav(tone(0.1)).replace(b"fmt \x10\0\0\0\x01\0\x01", b"fmt \x10\0\0\0\x01\0\0"), "has no channels"),
        (wav(tone(0.1), rate=7), "sampling_rate is 7; it must be in .1000, 768000."),
        (np.zeros(0, dtype=np.float32), "has no samples"),
        (np.zeros((3, 800), dtype=np.float32), "is read as 3 channels, but at most 2 are allowed; transpose it"),
        (np.zeros((800, 2), dtype=np.float32), "is read as 800 channels"),
        (np.zeros((1, 2, 3), dtype=np.float32), r"an array of shape \[1, 2, 3\] is not a recording"),
        (np.array([0.1, np.nan, 0.2]), "sample 1 of the recording is nan"),
        (np.array([0.1, 0.2, np.inf]), "sample 2 of the recording is inf"),
        (np.zeros(900, dtype=np.int64), "an array of int64 is not a recording"),
        (np.array(["a"]), "an array of <U1 is not a recording"),
        (np.zeros(30, dtype=np.float32), r"has 30 samples at 16000 a second, but the model needs at least 122"),
        ({"array": tone(0.1)}, 'a dict must have "array" and "sampling_rate"'),
        ({"array": tone(0.1), "sampling_rate": 0}, "sampling_rate is 0"),
        ({"array": tone(0.1), "sampling_rate": "fast"}, "sampling_rate is 'fast'"),
        ({"array": "abc", "sampling_rate": RATE}, "'array' is a str; it must be an array of numbers"),
        ({"array": tone(0.1), "sampling_rate": RATE, "stride": (1, 1)}, "not \\["),
    ],
)
def test_bad_recordings_are_refused_in_words(item: Any, words: str) -> None:
    model = senses.wav2vec2("SequenceClassification", num_labels=4)
    mine, _ = pair("audio-classification", model, senses.wave_extractor())
    with mine:
        with pytest.raises((InvalidInput, WrongType), match=words):
            mine(item)
        with pytest.raises((InvalidInput, WrongType), match=f"item 1: .*{words}"):
            mine([tone(0.1), item])


def test_damaged_wav_files_raise_nothing_else() -> None:
    whole, draw = wav(tone(0.05)), np.random.default_rng(0)
    for _ in range(400):
        broken = bytearray(whole[: int(draw.integers(1, len(whole) + 1))])
        for _ in range(int(draw.integers(4))):
            broken[int(draw.integers(min(len(broken), 60)))] = int(draw.integers(256))
        with contextlib.suppress(InvalidInput, WrongType):
            assert load_audio(bytes(broken), RATE).ndim == 1


def test_long_recordings_are_refused_by_their_length() -> None:
    with pytest.raises(InvalidInput, match=r"lasts 2.0 s and the limit is 1.5 s; cut it, or pass a larger max_seconds"):
        load_audio(tone(2.0), RATE, max_seconds=1.5)


# -- resampling --------------------------------------------------------------------------------------------------------


def by_the_formula(values: np.ndarray, rate: int, to: int) -> np.ndarray:
    """A sinc of six crossings under a Hann window, sample by sample: torchaudio's default."""
    common = math.gcd(rate, to)
    rate, to = rate // common, to // common
    base = min(rate, to) * 0.99
    found = []
    for j in range(math.ceil(len(values) * to / rate)):
        t = np.clip((np.arange(len(values)) / rate - j / to) * base, -6, 6)
        weights = np.sinc(t) * np.cos(t * np.pi / 12) ** 2 * base / rate
        found.append(float(values.astype(np.float64) @ weights))
    return np.array(found)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 15999])
def test_resampling_is_the_filter_people_know(rate: int) -> None:
    values = tone(0.02, rate=rate)
    found = resample(values, rate, RATE)
    np.testing.assert_allclose(found, by_the_formula(values, rate, RATE), atol=2e-6)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_a_sine_stays_a_sine(rate: int) -> None:
    values = np.sin(2 * np.pi * 440 * np.arange(rate) / rate).astype(np.float32)
    found = resample(values, rate, RATE)
    want = np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)
    assert np.abs(found - want)[200:-200].max() < 2e-3
    assert np.sqrt(np.mean(resample_high(rate) ** 2)) < 0.02, "what the new rate cannot hold is gone"


def resample_high(rate: int) -> np.ndarray:
    """A sine above what the lower of both rates can hold, after it was resampled."""
    if rate <= RATE:
        return np.zeros(1)
    values = np.sin(2 * np.pi * 9900 * np.arange(rate) / rate).astype(np.float32)
    return resample(values, rate, RATE)[200:-200]


def test_rates_do_not_change_what_is_heard() -> None:
    model = senses.wav2vec2("SequenceClassification", num_labels=4)
    mine, _ = pair("audio-classification", model, senses.wave_extractor())
    high = np.repeat(tone(0.5), 1)
    with mine:
        given = {"array": resample(high, RATE, 48000), "sampling_rate": 48000}
        back = load_audio(given, RATE)
        assert len(back) == len(high)
        same(mine(given), mine(back))
        same(mine(wav(given["array"], rate=48000, kind="f32")), mine(back))


@pytest.mark.parametrize(("kind", "magic"), [("FLAC", b"fLaC"), ("MP3", b"ID3"), ("Ogg", b"OggS")])
def test_other_formats_are_read_by_soundfile_or_name_the_extra(kind: str, magic: bytes) -> None:
    try:
        import soundfile
    except ImportError:
        with pytest.raises(hw.Unsupported, match=rf"is {kind}, which needs the package soundfile: .*headway\[audio\]"):
            load_audio(magic + bytes(40), RATE)
        return
    with pytest.raises(hw.InvalidInput, match=f"is {kind} and cannot be decoded"):
        load_audio(magic + bytes(40), RATE)
    file = io.BytesIO()
    soundfile.write(file, np.stack([tone(0.5)] * 2, axis=1), RATE, format=kind.upper())
    np.testing.assert_allclose(load_audio(file.getvalue(), RATE)[: RATE // 2], tone(0.5), atol=0.2)
