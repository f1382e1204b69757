"""Recordings in any form, as mono float32 samples at a model's sampling rate.

WAV files are read here (integers of 8 to 32 bits, floats of 32 and 64, any number of channels); FLAC, Ogg and MP3 by
the package `soundfile` (extra `audio`); other formats are an error that names them. Resampling is a windowed sinc, the
same filter as torchaudio's default. Never uses the network.
"""

from __future__ import annotations

import io
import math
import os
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, Unsupported, WrongType
from headway.base.text import short_repr
from headway.pipelines.inputs.images import is_cpu_tensor, read_file
from headway.pipelines.task import wrong_type

MAX_SECONDS = 4 * 3600.0
MAX_DECODED = 1 << 33  # bytes of samples, of a compressed file
BLOCK = 1 << 16  # samples decoded or computed at a time, to bound memory
RATES = (1_000, 768_000)
MOST_SECONDS = 1e9
EXPECTED = (
    'a recording: an array, {"array": ..., "sampling_rate": ...}, bytes or the path of a WAV, FLAC, Ogg or MP3 file'
)
ZERO_CROSSINGS, ROLLOFF = 6, 0.99  # of the sinc on each side; the share of the band that passes
OTHER_FORMATS = {
    b"fLaC": "FLAC",
    b"OggS": "Ogg",
    b"ID3": "MP3",
    b"\xff\xfb": "MP3",
    b"\xff\xf3": "MP3",
    b"FORM": "AIFF",
    b"\x1aE\xdf\xa3": "WebM",
    b"caff": "CAF",
    b"#!AMR": "AMR",
    b"RF64": "RF64",
}
BY_SOUNDFILE = ("FLAC", "Ogg", "MP3", "AIFF", "CAF", "RF64")
EXTRA = "pip install 'headway[audio]'"
CODECS = {2: "ADPCM", 6: "A-law", 7: "µ-law", 17: "IMA ADPCM", 49: "GSM", 80: "MPEG", 85: "MP3"}
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE


def is_audio(value: Any) -> bool:
    """Whether `value` is one recording rather than several."""
    kinds = (str, bytes, bytearray, memoryview, os.PathLike, Mapping, np.ndarray)
    return isinstance(value, kinds) or is_cpu_tensor(value)


def load_audio(item: Any, rate: int, *, max_seconds: float = MAX_SECONDS) -> np.ndarray:
    """[samples] in float32 at `rate`; several channels are averaged.

    A bare array is assumed to be at `rate` already: [samples], or [channels, samples] with at most two channels.
    """
    values, at = _waveform(item, rate, max_seconds)
    if not len(values):
        raise InvalidInput("the recording has no samples; pass one that is not empty")
    if len(values) > max_seconds * at:
        raise InvalidInput(
            f"the recording lasts {len(values) / at:.1f} s and the limit is {max_seconds:g} s; "
            "cut it, or pass a larger max_seconds=..."
        )
    if not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise InvalidInput(f"sample {bad} of the recording is {values[bad]}; every sample must be a finite number")
    return resample(values, at, rate)


def _waveform(item: Any, rate: int, max_seconds: float) -> tuple[np.ndarray, int]:
    """[samples] in float32 and their rate."""
    if isinstance(item, Mapping):
        return _of_dict(item, rate, max_seconds)
    if isinstance(item, (str, os.PathLike)):
        return decode(*read_file(item, "recording"), max_seconds=max_seconds)
    if isinstance(item, (bytes, bytearray, memoryview)):
        return decode(bytes(item), f"the {len(bytes(item))} bytes", max_seconds=max_seconds)
    if isinstance(item, np.ndarray) or is_cpu_tensor(item):
        return _one_channel(np.asarray(item)), rate
    raise wrong_type(item, EXPECTED)


def _of_dict(item: Mapping[str, Any], rate: int, max_seconds: float) -> tuple[np.ndarray, int]:
    """The recording in {"array" or "raw": ..., "sampling_rate": ...}, or in {"bytes": ..., "path": ...}."""
    name = "raw" if "raw" in item else "array"
    if name in item and "sampling_rate" in item and set(item) <= {name, "sampling_rate", "path"}:
        values = item[name]
        if not (isinstance(values, np.ndarray) or is_cpu_tensor(values)):
            try:
                values = np.asarray(values, dtype=np.float32)
            except (TypeError, ValueError) as error:
                raise WrongType(f"{name!r} is a {type(values).__name__}; it must be an array of numbers") from error
        return _one_channel(np.asarray(values)), check_rate(item["sampling_rate"])
    if item and set(item) <= {"bytes", "path"}:
        return _waveform(item["bytes"] if item.get("bytes") is not None else item.get("path"), rate, max_seconds)
    raise InvalidInput(
        f'a dict must have "array" and "sampling_rate", or "bytes" and "path", not {sorted(map(str, item))}'
    )


def check_seconds(name: str, value: Any, *, zero: bool = False) -> None:
    """Raise InvalidInput unless `value` is a positive number of seconds, or 0 if `zero`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and value <= MOST_SECONDS
    if not number or value < 0 or (value == 0 and not zero):
        raise InvalidInput(
            f"{name} is {short_repr(value)}; it must be a number of seconds {'of at least' if zero else 'above'} 0, at "
            f"most {MOST_SECONDS:g}"
        )


def check_rate(rate: Any) -> int:
    """`rate` if it is a valid sampling rate."""
    if isinstance(rate, bool) or not isinstance(rate, (int, np.integer)):
        raise WrongType(f"sampling_rate is {short_repr(rate)}; it must be an integer, in Hz")
    if not RATES[0] <= rate <= RATES[1]:
        raise InvalidInput(f"sampling_rate is {rate}; it must be in [{RATES[0]}, {RATES[1]}] Hz")
    return int(rate)


def _one_channel(values: np.ndarray) -> np.ndarray:
    """[samples] in float32, integers scaled to [-1, 1]."""
    if values.ndim == 2 and values.shape[0] > 2:
        raise InvalidInput(
            f"an array of shape {list(values.shape)} is read as {values.shape[0]} channels, but at most 2 are allowed; "
            "transpose it if it is [samples, channels], or mix it to one channel first"
        )
    if values.ndim not in (1, 2):
        raise InvalidInput(f"an array of shape {list(values.shape)} is not a recording; it must be [samples]")
    scaled = _scaled(values)
    return scaled if values.ndim == 1 else scaled.mean(axis=0, dtype=np.float32)


def _scaled(values: np.ndarray) -> np.ndarray:
    kind = values.dtype
    if np.issubdtype(kind, np.floating):
        return values.astype(np.float32, copy=False)
    if kind == np.uint8:
        return (values.astype(np.float32) - 128) / 128
    if kind in (np.int16, np.int32):
        return (values / -float(np.iinfo(kind).min)).astype(np.float32)
    raise WrongType(f"an array of {kind} is not a recording; use float, int16, int32 or uint8")


# -- files -------------------------------------------------------------------------------------------------------------


def decode(
    data: bytes, name: str, *, max_seconds: float = MAX_SECONDS, max_bytes: int = MAX_DECODED
) -> tuple[np.ndarray, int]:
    """[samples] in float32, channels averaged, and their rate, of a file in any format that can be read.

    A compressed file is decoded piece by piece, and no further than the limits: its header may say anything.
    """
    kind = next((kind for magic, kind in OTHER_FORMATS.items() if data.startswith(magic)), None)
    if kind not in BY_SOUNDFILE:
        return parse_wav(data, name)
    return _by_soundfile(data, name, kind, max_seconds, max_bytes)


def _by_soundfile(data: bytes, name: str, kind: str, max_seconds: float, max_bytes: int) -> tuple[np.ndarray, int]:
    try:
        import soundfile  # type: ignore[import-not-found]
    except (ImportError, OSError) as error:  # OSError: its library is missing
        raise Unsupported(
            f"{name} is {kind}, which needs the package soundfile: {EXTRA}; or convert it first "
            "(ffmpeg -i FILE -ac 1 out.wav)"
        ) from error
    pieces: list[np.ndarray] = []
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            rate, left = check_rate(int(file.samplerate)), max_bytes // 4
            most = int(min(left, max_seconds * rate)) + 1
            while most > 0 and len(piece := file.read(min(BLOCK, most), dtype="float32", always_2d=True)):
                pieces.append(piece.mean(axis=1, dtype=np.float32))  # [samples, channels] → [samples]
                most -= len(piece)
    except (soundfile.SoundFileError, TypeError, ValueError, AssertionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InvalidInput(f"{name} is {kind} and cannot be decoded ({reason}): damaged or truncated") from error
    values = np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
    if len(values) > left:
        raise InvalidInput(f"{name} is {kind} with more than {max_bytes} bytes of samples, which is the limit; cut it")
    return values, rate


# -- WAV ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Format:
    """The contents of the "fmt " chunk."""

    codec: int
    channels: int
    rate: int
    bits: int


def parse_wav(data: bytes, name: str = "the WAV") -> tuple[np.ndarray, int]:
    """[samples] in float32, channels averaged, and their rate."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        kind = next((kind for magic, kind in OTHER_FORMATS.items() if data.startswith(magic)), None)
        problem = f"is {kind}, which is not supported" if kind else "is not a WAV file"
        raise InvalidInput(
            f"{name} {problem}; convert it first (ffmpeg -i FILE -ac 1 out.wav), "
            'or pass {"array": ..., "sampling_rate": ...}'
        )
    chunks = _chunks(data, name)
    if b"fmt " not in chunks or b"data" not in chunks:
        raise InvalidInput(f"{name} is a WAV file without {'samples' if b'fmt ' in chunks else 'a format'}: damaged")
    form = _format(chunks[b"fmt "], name)
    return _samples(chunks[b"data"], form, name), check_rate(form.rate)


def _chunks(data: bytes, name: str) -> dict[bytes, memoryview]:
    """The chunks of a RIFF file up to its samples."""
    chunks: dict[bytes, memoryview] = {}
    view, at = memoryview(data), 12
    while at + 8 <= len(data) and b"data" not in chunks:
        tag, size = struct.unpack_from("<4sI", data, at)
        if tag == b"data" and size == 0xFFFFFFFF:  # written to a pipe: its length was unknown
            size = len(data) - at - 8
        if at + 8 + size > len(data):
            raise InvalidInput(f"{name} is truncated: its {tag!r} has {size} bytes, and {len(data) - at - 8} are there")
        chunks[tag] = view[at + 8 : at + 8 + size]
        at += 8 + size + size % 2
    return chunks


def _format(chunk: memoryview, name: str) -> _Format:
    if len(chunk) < 16:
        raise InvalidInput(f"{name} has a format of {len(chunk)} bytes instead of 16: damaged")
    codec, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", chunk)
    if codec == EXTENSIBLE and len(chunk) >= 26:
        codec = struct.unpack_from("<H", chunk, 24)[0]
    if (codec, bits) not in {(PCM, 8), (PCM, 16), (PCM, 24), (PCM, 32), (FLOAT, 32), (FLOAT, 64)}:
        codec_name = {PCM: "integers", FLOAT: "floats"}.get(codec, CODECS.get(codec, f"codec {codec}"))
        raise InvalidInput(
            f"{name} holds {codec_name} of {bits} bits; integers of 8 to 32 and floats of 32 or 64 bits are supported"
        )
    if not channels:
        raise InvalidInput(f"{name} has no channels: damaged")
    return _Format(codec, channels, rate, bits)


def _samples(chunk: memoryview, form: _Format, name: str) -> np.ndarray:
    width = form.channels * form.bits // 8
    if len(chunk) % width:
        raise InvalidInput(f"{name} has {len(chunk)} bytes of samples, not a multiple of {width}: damaged or truncated")
    if form.codec == FLOAT:
        values = np.frombuffer(chunk, dtype=f"<f{form.bits // 8}").astype(np.float32)
    elif form.bits == 24:
        parts = np.frombuffer(chunk, dtype=np.uint8).reshape(-1, 3)
        wide = np.zeros((len(parts), 4), dtype=np.uint8)
        wide[:, 1:] = parts  # the upper three bytes of a 32-bit integer
        values = _scaled(wide.reshape(-1).view("<i4").astype(np.int32, copy=False))
    else:
        values = _scaled(np.frombuffer(chunk, dtype={8: "u1", 16: "<i2", 32: "<i4"}[form.bits]))
    values = values.reshape(-1, form.channels)
    return values[:, 0] if form.channels == 1 else values.mean(axis=1, dtype=np.float32)


# -- resampling --------------------------------------------------------------------------------------------------------


def resample(values: np.ndarray, rate: int, to: int) -> np.ndarray:
    """`values` resampled from `rate` to `to`, band-limited: ceil(samples × to ÷ rate) of them."""
    if rate == to:
        return np.ascontiguousarray(values, dtype=np.float32)
    common = math.gcd(rate, to)
    step, phases = rate // common, to // common  # output j is at j × step ÷ phases of the input
    weights, reach = _filter(step, phases)
    padded = np.pad(values.astype(np.float32, copy=False), reach)
    windows = np.lib.stride_tricks.sliding_window_view(padded, weights.shape[1])
    output = np.empty(-(-len(values) * phases // step), dtype=np.float32)
    for start in range(0, len(output), BLOCK):
        places = np.arange(start, min(start + BLOCK, len(output))) * step
        near = windows[places // phases]
        output[start : start + len(places)] = np.einsum("ij,ij->i", near, weights[places % phases])
    return output


@lru_cache(maxsize=8)
def _filter(step: int, phases: int) -> tuple[np.ndarray, int]:
    """The filter of each phase, [phases, 2 × reach + 1], and its reach in samples.

    A Hann-windowed sinc, ZERO_CROSSINGS wide, that passes ROLLOFF of the narrower band.
    """
    cutoff = min(1.0, phases / step) * ROLLOFF  # in cycles of half the input's rate
    reach = math.ceil(ZERO_CROSSINGS / cutoff)
    offsets = np.arange(-reach, reach + 1)[None, :] - (np.arange(phases) / phases)[:, None]  # [phases, taps]
    t = np.clip(offsets * cutoff, -ZERO_CROSSINGS, ZERO_CROSSINGS)
    window = np.cos(t * np.pi / ZERO_CROSSINGS / 2) ** 2
    return (np.sinc(t) * window * cutoff).astype(np.float32), reach
