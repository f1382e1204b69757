"""Recordings over HTTP, through the official client: every format, times, streams, languages, CTC models."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import soundfile

import headway as hw
from support.live import Live
from support.senses import RATE, tone, wav_file

SHORT, LONG = tone(1.5, seed=1), tone(5.3, seed=2)  # the window has two seconds
STAMP = r"\d\d:\d\d:\d\d[.,]\d{3}"


@pytest.fixture(scope="module")
def client(hearing: Live) -> Iterator[openai.OpenAI]:
    """With retries: the server may close a kept connection in the moment in which it is used again."""
    with openai.OpenAI(base_url=f"{hearing.url}/v1", api_key="none") as client:
        yield client


def audio(samples: np.ndarray = SHORT) -> Any:
    return ("speech.wav", wav_file(samples))


def test_a_recording_is_what_the_pipeline_hears(client: openai.OpenAI, whisper_folder: str) -> None:
    given = client.audio.transcriptions.create(model="small-whisper", file=audio(), language="en")
    with hw.pipeline("automatic-speech-recognition", whisper_folder, device="cpu") as peer:
        heard = peer({"bytes": wav_file(SHORT)}, language="en", task="transcribe")
        english = peer({"bytes": wav_file(SHORT)}, task="translate", language="de")
    assert given.text == heard["text"].lstrip()
    assert given.text
    assert (given.usage.type, given.usage.seconds) == ("duration", 2)
    translated = client.audio.translations.create(model="small-whisper", file=audio())
    assert translated.text
    assert isinstance(english["text"], str)


def test_every_format_has_the_same_words(client: openai.OpenAI) -> None:
    def made(format: Any, **more: Any) -> Any:
        return client.audio.transcriptions.create(
            model="small-whisper", file=audio(), language="en", response_format=format, **more
        )

    verbose = made("verbose_json", timestamp_granularities=["word", "segment"])
    assert (verbose.task, verbose.language, verbose.duration) == ("transcribe", "en", 1.5)
    assert "".join(one.text for one in verbose.segments).lstrip() == verbose.text
    assert all(0 <= one.start <= one.end <= 1.5 for one in (*verbose.segments, *verbose.words))
    assert verbose.segments[0].tokens
    assert verbose.words[0].word
    times = re.findall(rf"^{STAMP} --> {STAMP}$", made("srt"), re.MULTILINE)
    assert len(times) == len(verbose.segments)
    assert all("," in one for one in times)
    vtt = made("vtt")
    assert vtt.startswith("WEBVTT\n\n")
    assert len(re.findall(rf"^{STAMP} --> {STAMP}$", vtt, re.MULTILINE)) == len(verbose.segments)
    assert made("text") == made("json").text + "\n"
    only_words = made("verbose_json", timestamp_granularities=["word"])
    assert only_words.words
    assert only_words.segments is None


def test_a_long_recording_streams_window_by_window(client: openai.OpenAI) -> None:
    whole = client.audio.transcriptions.create(model="small-whisper", file=audio(LONG), language="en")
    events = list(
        client.audio.transcriptions.create(model="small-whisper", file=audio(LONG), language="en", stream=True)
    )
    deltas = [one.delta for one in events if one.type == "transcript.text.delta"]
    assert [one.type for one in events[-1:]] == ["transcript.text.done"]
    assert "".join(deltas) == events[-1].text == whole.text
    assert len(deltas) > 1
    verbose: Any = client.audio.transcriptions.create(
        model="small-whisper", file=audio(LONG), language="en", response_format="verbose_json"
    )
    starts = [one.start for one in verbose.segments]
    assert starts == sorted(starts)
    assert starts[-1] > 2
    assert verbose.segments[-1].end <= 5.3


def test_a_language_is_found_where_none_is_named(client: openai.OpenAI) -> None:
    found: Any = client.audio.transcriptions.create(model="small-whisper", file=audio(), response_format="verbose_json")
    assert found.language


def test_a_prompt_and_a_temperature_reach_the_model(client: openai.OpenAI) -> None:
    plain = client.audio.transcriptions.create(model="small-whisper", file=audio(), language="en")
    prompted = client.audio.transcriptions.create(model="small-whisper", file=audio(), language="en", prompt="abc def")
    warm = {
        client.audio.transcriptions.create(model="small-whisper", file=audio(), language="en", temperature=1.5).text
        for _ in range(3)
    }
    assert prompted.text != plain.text
    assert len(warm | {plain.text}) > 1


def test_other_files_than_wav_are_read(client: openai.OpenAI) -> None:
    for format in ("FLAC", "OGG", "MP3"):
        file = io.BytesIO()
        soundfile.write(file, np.stack([SHORT, SHORT], 1), RATE, format=format)
        made = client.audio.transcriptions.create(model="small-whisper", file=(f"a.{format}", file.getvalue()))
        assert made.text
    slow = client.audio.transcriptions.create(
        model="small-whisper", file=("a.wav", wav_file(tone(1.0, rate=8000), 8000))
    )
    assert slow.usage.seconds == 1


def test_models_are_listed_and_others_are_refused_by_name(hearing: Live, client: openai.OpenAI) -> None:
    assert "small-whisper" in [one.id for one in client.models.list()]
    with pytest.raises(openai.NotFoundError, match="small-whisper"):
        client.audio.transcriptions.create(model="whisper-9", file=audio())


def test_a_ctc_model_has_words_and_no_languages(hearing_ctc: Live) -> None:
    with openai.OpenAI(base_url=f"{hearing_ctc.url}/v1", api_key="none") as client:
        made: Any = client.audio.transcriptions.create(
            model="small-ctc", file=audio(), response_format="verbose_json", timestamp_granularities=["word"]
        )
        assert made.text.split() == [one.word for one in made.words]
        events = list(client.audio.transcriptions.create(model="small-ctc", file=audio(), stream=True))
        assert events[-1].text == made.text
        for more in ({"language": "en"}, {"prompt": "a"}, {"temperature": 0.5}):
            with pytest.raises(openai.BadRequestError, match="remove"):
                client.audio.transcriptions.create(model="small-ctc", file=audio(), **more)
        with pytest.raises(openai.BadRequestError, match="does not translate"):
            client.audio.translations.create(model="small-ctc", file=audio())
