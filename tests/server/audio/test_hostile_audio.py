"""Files that are no recordings, or too much of one: refused in words, in a process of their own, nobody else harmed."""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import struct
import threading
import time
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from headway.pipelines.inputs import decode_process
from headway.pipelines.inputs.decode_process import DecodeLimits
from headway.server.audio.decoder import AudioDecoder
from headway.server.errors import ApiError
from headway.server.pooling import PoolingModels
from headway.server.settings import ServerSettings
from support.live import PATIENCE, Answer, Live
from support.senses import RATE, tone, wav_file
from support.small import at_rest, tokens_of

PATH = "/v1/audio/transcriptions"


def form(*parts: tuple[str, bytes], boundary: str = "line") -> bytes:
    pieces = []
    for name, value in parts:
        file = '; filename="a.wav"' if name == "file" else ""
        pieces.append(f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + value)
    return b"\r\n".join(pieces) + f"\r\n--{boundary}--\r\n".encode()


def post(server: Live, file: bytes | None, path: str = PATH, **fields: str) -> Answer:
    parts = [(name, value.encode()) for name, value in fields.items()]
    parts += [] if file is None else [("file", file)]
    return server.ask("POST", path, form(*parts), {"content-type": "multipart/form-data; boundary=line"})


def flac(samples: np.ndarray, rate: int = RATE, format: str = "FLAC") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=format)
    return file.getvalue()


def silent_flac(seconds: float) -> bytes:
    """Hours of silence in a small file."""
    return flac(np.zeros(round(seconds * RATE), np.int16))


def many_channels() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(60_000)
        out.setsampwidth(1)
        out.setframerate(RATE)
        out.writeframes(bytes(60_000 * 8))
    return file.getvalue()


def hostile() -> dict[str, bytes]:
    good = wav_file(tone(0.5))
    nan = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 44, b"WAVE", b"fmt ", 16, 3, 1, RATE, RATE * 4, 4, 32, b"data", 8)
    return {
        "nothing of audio": b"hello there, this is not a recording",
        "a header alone": good[:44],
        "a torn header": good[:20],
        "torn in its samples": good[:-7],
        "a codec that is not supported": good[:20] + b"\x55\x00" + good[22:],
        "a rate beyond all": good[:24] + struct.pack("<I", 4_000_000_000) + good[28:],
        "a rate of zero": good[:24] + bytes(4) + good[28:],
        "samples that are not numbers": nan + np.array([np.nan, 1], "<f4").tobytes(),
        "a flac that ends": flac(tone(0.5))[:60],
        "an mp3 of noise": b"ID3" + bytes(range(256)) * 40,
        "an ogg of noise": b"OggS" + bytes(range(256)) * 40,
        "webm": b"\x1aE\xdf\xa3" + bytes(100),
        "too long": silent_flac(90.0),
        "far too long": silent_flac(1500.0),
    }


def test_what_is_no_recording_is_refused_in_words(hearing: Live) -> None:
    right = tokens_of(hearing)
    for name, file in hostile().items():
        answer = post(hearing, file)
        assert answer.status == 400, (name, answer.body)
        assert answer.error["param"] == "file", name
        assert answer.error["code"] == "invalid_audio", name
        assert "Traceback" not in answer.error["message"], name
        assert "/" not in answer.error["message"].replace("out.wav", ""), name
    assert "60 s" in post(hearing, silent_flac(90.0)).error["message"]
    assert tokens_of(hearing) == right
    at_rest(hearing)


def test_a_file_of_many_channels_is_one_recording(hearing: Live) -> None:
    answer = post(hearing, many_channels())
    assert answer.status in (200, 400), answer.body


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "mp4"}, "response_format"),
        ({"temperature": "3"}, "temperature"),
        ({"temperature": "nan"}, "temperature"),
        ({"language": "x; rm"}, "language"),
        ({"language": "klingon"}, "language"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        ({"stream": "true", "response_format": "srt"}, "stream"),
        ({"stream": "maybe"}, "stream"),
        ({"chunking_strategy": "auto"}, "chunking_strategy"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_fields_are_named(hearing: Live, fields: dict[str, str], param: str | None) -> None:
    answer = post(hearing, wav_file(tone(0.5)), **fields)
    assert answer.status == 400, answer.body
    assert answer.error["param"] == param


def test_a_long_prompt_is_cut_to_its_end(hearing: Live) -> None:
    assert post(hearing, wav_file(tone(0.5)), prompt="a long tale " * 80, language="en").status == 200


def test_what_is_no_form_with_a_file_is_refused(hearing: Live) -> None:
    assert post(hearing, None, model="small-whisper").error["param"] == "file"
    assert post(hearing, b"").error["code"] == "invalid_audio"
    answer = hearing.ask("POST", PATH, b"{}", {"content-type": "application/json"})
    assert answer.error["code"] == "invalid_form"


def test_a_client_that_leaves_stops_at_the_next_window(
    hearing: Live, whispers: PoolingModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the 25 windows, which take their time, few are computed: none begins after the client was gone."""
    pipeline, begun = whispers.get("audio", model=None).pipeline, []
    submit = pipeline.submit

    async def slow(piece: Any, **options: Any) -> Any:
        begun.append(len(piece))
        await asyncio.sleep(0.2)
        return await submit(piece, **options)

    monkeypatch.setattr(pipeline, "submit", slow)
    body = form(("file", wav_file(tone(50.0))), ("language", b"en"), ("stream", b"true"))
    head = f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: multipart/form-data; boundary=line\r\n"
    with socket.create_connection(("127.0.0.1", hearing.port), timeout=PATIENCE) as client:
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        received = b""
        while b"transcript.text.delta" not in received:
            piece = client.recv(65536)
            assert piece, received
            received += piece
    hearing.until(lambda: hearing.get("/load").json == {"server_load": 0})
    count = len(begun)
    assert 0 < count < 20
    time.sleep(0.5)  # more than two windows would take
    assert len(begun) == count
    at_rest(hearing)


# -- the process itself ------------------------------------------------------------------------------------------------


def decode(data: bytes, **limits: Any) -> np.ndarray:
    async def run() -> np.ndarray:
        return await AudioDecoder(ServerSettings(**limits)).samples(data, RATE)

    return asyncio.run(run())


def test_samples_come_back_as_they_are() -> None:
    given = tone(1.0)
    np.testing.assert_allclose(decode(wav_file(given)), given, atol=1e-4)


def test_files_in_memory_that_only_linux_has_are_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    given = tone(0.5)
    np.testing.assert_allclose(decode(wav_file(given)), given, atol=1e-4)


def test_a_compressed_file_cannot_become_large() -> None:
    with pytest.raises(ApiError, match="bytes of samples"):
        decode(silent_flac(100.0), max_audio_bytes=1 << 20)
    with pytest.raises(ApiError, match="lasts more than 5 s"):
        decode(silent_flac(100.0), max_audio_seconds=5.0)


def test_memory_and_time_end_a_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def command(body: str) -> Any:
        script = tmp_path / "decode.py"
        script.write_text(
            "import json, sys\nfrom headway.pipelines.inputs.decode_process import *\n"
            f"limits = DecodeLimits(**json.loads(sys.argv[1]))\nlimits.apply()\n{body}\n"
        )
        import sys
        from dataclasses import asdict

        return lambda limits: [sys.executable, str(script), json.dumps(asdict(limits))]

    for body, message in (
        ("while True: pass", "within 1 s"),
        ("import time\ntime.sleep(100)", "within 1 s"),
        ("b = bytearray(8 << 30)", "damaged, or takes more memory"),
        ("open('/dev/null')\nimport os\nos.kill(os.getpid(), 11)", "damaged"),
        ("print('{\"samples\": 5}')", "cut off"),
    ):
        monkeypatch.setattr(decode_process.DecodeLimits, "command", command(body))
        with pytest.raises(ApiError, match=message):
            decode(b"x", audio_timeout=1.0 if "1 s" in message else 60.0)


def test_limits_are_the_kernels() -> None:
    limits = DecodeLimits(RATE, 10.0, 1 << 20, 3)
    assert limits.memory < 1 << 30
    assert threading.active_count() < 100
