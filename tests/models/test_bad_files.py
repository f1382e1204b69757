"""Model files that lie: each named lie is refused by name, and random damage meets only Headway's own errors."""

from __future__ import annotations

import json
import os
import re
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headway as hw
from headway.base.errors import BadModelFile, HeadwayError, UnsupportedModel
from headway.models.files.gguf import KINDS, GgufFile
from headway.models.files.weights import open_weights
from support.hf import random_hf, save_hf
from support.properties import examples

CPU = torch.device("cpu")
F32, Q8_0, STRING, ARRAY, U32, BOOL = 0, 8, 8, 9, 4, 7


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str | bytes, dims: tuple[int, ...], kind: int, offset: int, count: int | None = None) -> bytes:
    numbers = struct.pack(f"<{len(dims)}Q", *dims)
    return (
        text(name)
        + struct.pack("<I", len(dims) if count is None else count)
        + numbers
        + struct.pack("<IQ", kind, offset)
    )


def gguf_file(
    keys: list[bytes] = [],  # noqa: B006
    tensors: list[bytes] = [],  # noqa: B006
    *,
    data: int = 256,
    magic: bytes = b"GGUF",
    version: int = 3,
    tensor_count: int | None = None,
    key_count: int | None = None,
) -> bytes:
    counts = (len(tensors) if tensor_count is None else tensor_count, len(keys) if key_count is None else key_count)
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + bytes(data)


ARCHITECTURE = key("general.architecture", STRING, text("llama"))
GOOD = tensor("a", (8,), F32, 0)
ALIGN = "general.alignment"

GGUF_LIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "only a magic": (b"GGUF", "the version reaches byte 8, but the file ends at byte 4"),
    "magic": (gguf_file(magic=b"GGML"), "magic number is b'GGML'"),
    "version 1": (gguf_file(version=1), "version 1; Headway reads versions 2 and 3"),
    "version 4": (gguf_file(version=4), "version 4"),
    "big-endian": (gguf_file(version=0x03000000), "big-endian"),
    "2^63 tensors": (gguf_file(tensor_count=2**63), "tensor count is 9223372036854775808; the limit is"),
    "2^63 keys": (gguf_file(key_count=2**63), "key count is 9223372036854775808; the limit is"),
    "more tensors than bytes": (gguf_file([], [GOOD], tensor_count=200_000), "tensor count of 200000 reaches byte"),
    "more keys than bytes": (gguf_file([ARCHITECTURE], key_count=200_000), "key count of 200000 reaches byte"),
    "key length": (gguf_file([struct.pack("<Q", 2**63) + b"abc"]), "key 0 is 9223372036854775808 bytes long"),
    "key past the end": (gguf_file([struct.pack("<Q", 60_000)]), "key 0, 60000 bytes long, reaches byte"),
    "empty key": (gguf_file([key("", U32, bytes(4))]), "key 0 is 0 bytes long"),
    "key not UTF-8": (gguf_file([key(b"a\xff", U32, bytes(4))]), "key 0 is not UTF-8"),
    "key twice": (gguf_file([ARCHITECTURE, ARCHITECTURE]), "'general.architecture' appears twice"),
    "string length": (gguf_file([key("k", STRING, struct.pack("<Q", 2**64 - 1))]), "'k', 18446744073709551615 bytes"),
    "string not UTF-8": (gguf_file([key("k", STRING, text(b"\xc3"))]), "'k' is not UTF-8"),
    "value type": (gguf_file([key("k", 13, bytes(8))]), "'k' has value type 13"),
    "item type": (gguf_file([key("k", ARRAY, struct.pack("<IQ", 99, 1))]), "'k' has value type 99"),
    "nested array": (gguf_file([key("k", ARRAY, struct.pack("<IQ", ARRAY, 1))]), "array of arrays"),
    "2^63 items": (gguf_file([key("k", ARRAY, struct.pack("<IQ", U32, 2**63))]), "length of metadata 'k' is 92233"),
    "items past the end": (gguf_file([key("k", ARRAY, struct.pack("<IQ", U32, 99_999))]), "of 99999 reaches byte"),
    "strings past the end": (gguf_file([key("k", ARRAY, struct.pack("<IQ", STRING, 9999))]), "of 9999 reaches byte"),
    "item past the end": (gguf_file([key("k", ARRAY, struct.pack("<IQQ", STRING, 1, 2**62))]), "'k' item 0 reaches"),
    "item not UTF-8": (gguf_file([key("k", ARRAY, struct.pack("<IQ", STRING, 1) + text(b"\xff"))]), "item 0 is not"),
    "boolean": (gguf_file([key("k", BOOL, b"\x02")]), "byte 2 as a boolean"),
    "alignment 0": (gguf_file([key(ALIGN, U32, struct.pack("<I", 0))]), "alignment is 0; it must be a power of two"),
    "alignment 48": (gguf_file([key(ALIGN, U32, struct.pack("<I", 48))]), "alignment is 48"),
    "alignment 2^31": (gguf_file([key(ALIGN, U32, struct.pack("<I", 2**31))]), "alignment is 2147483648"),
    "alignment a string": (gguf_file([key(ALIGN, STRING, text("32"))]), "alignment is '32'"),
    "tensor twice": (gguf_file([], [GOOD, GOOD]), "tensor 'a' appears twice"),
    "tensor without a name": (gguf_file([], [tensor("", (8,), F32, 0)]), "name of tensor 0 is 0 bytes"),
    "five dimensions": (gguf_file([], [tensor("a", (1,) * 5, F32, 0)]), "5 dimensions; the format has 1 to 4"),
    "no dimensions": (gguf_file([], [tensor("a", (), F32, 0)]), "0 dimensions"),
    "2^32 - 1 dimensions": (gguf_file([], [tensor("a", (1,), F32, 0, 2**32 - 1)]), "4294967295 dimensions"),
    "a zero dimension": (gguf_file([], [tensor("a", (8, 0), F32, 0)]), "each must be at least 1"),
    "2^63 values": (gguf_file([], [tensor("a", (2**63,), F32, 0)]), "would take 36893488147419103232 bytes"),
    "dimensions that overflow": (gguf_file([], [tensor("a", (2**32, 2**32), F32, 0)]), "would take"),
    "half a block": (gguf_file([], [tensor("a", (33,), Q8_0, 0)]), "33 values, not a multiple of the Q8_0 block"),
    "unaligned offset": (gguf_file([], [tensor("a", (8,), F32, 4)]), "offset 4, which is not a multiple"),
    "offset past the end": (gguf_file([], [tensor("a", (8,), F32, 2**63)]), "ends at byte .* truncated"),
    "truncated data": (gguf_file([], [tensor("a", (64,), F32, 32)]), "ends at byte .* truncated"),
    "overlap": (
        gguf_file([], [tensor("a", (16,), F32, 0), tensor("b", (8,), F32, 32)]),
        "'b' starts at byte .*, inside tensor 'a'",
    ),
    "same place": (gguf_file([], [GOOD, tensor("b", (8,), F32, 0)]), "inside tensor"),
}


def test_the_file_the_lies_are_made_from_is_good(tmp_path: Path) -> None:
    keys = [
        ARCHITECTURE,
        key("k", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + text("")),
        key("b", BOOL, b"\x01"),
    ]
    (tmp_path / "m.gguf").write_bytes(gguf_file(keys, [GOOD, tensor("b", (32, 2), Q8_0, 32)]))
    with GgufFile.open(tmp_path / "m.gguf") as file:
        assert file.metadata == {"general.architecture": "llama", "k": ["x", ""], "b": True}
        assert {name: (t.shape, t.kind) for name, t in file.tensors.items()} == {
            "a": ((8,), "F32"),
            "b": ((2, 32), "Q8_0"),
        }


@pytest.mark.parametrize("lie", GGUF_LIES)
def test_a_gguf_header_that_lies_is_refused(tmp_path: Path, lie: str) -> None:
    data, message = GGUF_LIES[lie]
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(BadModelFile, match=message) as caught:
        open_weights(tmp_path / "m.gguf")
    assert str(tmp_path / "m.gguf") in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(("kind", "name"), [(77, "the unknown type 77"), (15, "Q8_K (type 15)")])
def test_a_tensor_type_that_is_not_supported_is_no_damage(tmp_path: Path, kind: int, name: str) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf_file([], [tensor("a", (256,), kind, 0)]))
    message = f"{tmp_path / 'm.gguf'}: tensor 'a' is stored as {name}; Headway reads F32, F16, BF16"
    with pytest.raises(UnsupportedModel, match=re.escape(message)) as caught:
        open_weights(tmp_path / "m.gguf")
    assert not isinstance(caught.value, BadModelFile)


def test_every_truncation_of_a_gguf_file_is_refused(tmp_path: Path) -> None:
    keys = [ARCHITECTURE, key("k", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + text("yy"))]
    whole = gguf_file(keys, [GOOD], data=32)
    for length in range(len(whole)):
        (tmp_path / "m.gguf").write_bytes(whole[:length])
        with pytest.raises(BadModelFile):
            GgufFile.open(tmp_path / "m.gguf")


def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(BadModelFile, match="not a regular file"):
        open_weights(tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_in_a_folder_is_refused_without_waiting_for_a_writer(tmp_path: Path, name: str) -> None:
    _, model = random_hf("llama", 0)
    folder = save_hf(tmp_path, model)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(HeadwayError, match=f"{name} is not a regular file|has no .*safetensors"):
        hw.Engine(folder, pages=8).close()


def entry(dtype: object = "F32", shape: object = [2], offsets: object = [0, 8]) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def safetensors_file(header: object, *, length: int | None = None, data: int = 64) -> bytes:
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(body) if length is None else length).to_bytes(8, "little") + body + bytes(data)


SAFETENSORS_LIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "too short": (b"1234567", "has 7 bytes"),
    "2^63 header": (safetensors_file({}, length=2**63), "header length is 9223372036854775808; the limit is"),
    "header past the end": (safetensors_file({}, length=1000), "takes 1000 bytes, but the file has 74"),
    "header not JSON": (safetensors_file(b"{'w'"), "not valid JSON"),
    "header not UTF-8": (safetensors_file(b'{"\xff": 1}'), "not valid JSON"),
    "header a list": (safetensors_file([]), "JSON list, not an object"),
    "deep nesting": (safetensors_file(b"[" * 200_000), "not valid JSON"),
    "a number without end": (safetensors_file(b'{"w": ' + b"9" * 10_000 + b"}"), "not valid JSON"),
    "tensor twice": (safetensors_file(b'{"w": 1, "w": 2}'), "key 'w' twice"),
    "field twice": (safetensors_file(b'{"w": {"dtype": "F32", "dtype": "F16"}}'), "key 'dtype' twice"),
    "metadata": (safetensors_file({"__metadata__": {"a": 1}}), "__metadata__ is {'a': 1}"),
    "no fields": (safetensors_file({"w": {}}), "exactly dtype, shape and data_offsets"),
    "more fields": (safetensors_file({"w": entry() | {"scale": 2}}), "exactly dtype"),
    "not an object": (safetensors_file({"w": 3}), "'w' is 3"),
    "unknown dtype": (safetensors_file({"w": entry("F33")}), "dtype 'F33'; the format has F64"),
    "dtype not a name": (safetensors_file({"w": entry(["F32"])}), r"dtype \['F32'\]"),
    "wrong dtype": (safetensors_file({"w": entry("F16")}), "as F16 takes 4 bytes, but its data_offsets span 8"),
    "half a byte": (safetensors_file({"w": entry("F4", [3], [0, 1])}), "takes 2 bytes"),
    "shape not a list": (safetensors_file({"w": entry(shape="2")}), "shape '2'"),
    "negative shape": (safetensors_file({"w": entry(shape=[-1, -2])}), r"shape \[-1, -2\]"),
    "shape of floats": (safetensors_file({"w": entry(shape=[2.0])}), r"shape \[2.0\]"),
    "shape of booleans": (safetensors_file({"w": entry(shape=[True, 2])}), "shape"),
    "nine dimensions": (safetensors_file({"w": entry(shape=[1] * 9)}), "9 dimensions; the limit is 8"),
    "2^63 values": (safetensors_file({"w": entry(shape=[2**63])}), "more than 2.60 values"),
    "none of 2^63": (safetensors_file({"w": entry(shape=[0, 2**63], offsets=[0, 0])}), "more than 2.60 values"),
    "digits": (safetensors_file({"w": entry(shape=[10**4000])}), "more than 2.60 values"),
    "one offset": (safetensors_file({"w": entry(offsets=[0])}), "two integers"),
    "offsets not numbers": (safetensors_file({"w": entry(offsets=[0, "8"])}), "two integers"),
    "negative offset": (safetensors_file({"w": entry(offsets=[-8, 0])}), r"is at \[-8, 0\] of 64 bytes"),
    "backward offsets": (safetensors_file({"w": entry(offsets=[8, 0])}), "is at"),
    "offset past the end": (safetensors_file({"w": entry(offsets=[60, 68])}), r"is at \[60, 68\] of 64 bytes"),
    "2^63 offset": (safetensors_file({"w": entry(offsets=[0, 2**63])}), "is at"),
    "overlap": (safetensors_file({"w": entry(), "v": entry(offsets=[4, 12])}), "'v' starts at .* inside tensor 'w'"),
    "same place": (safetensors_file({"w": entry(), "v": entry()}), "inside tensor"),
    "a long name": (safetensors_file({"w" * 50_000: 1}), "exactly dtype"),
}


@pytest.mark.parametrize("lie", SAFETENSORS_LIES)
@pytest.mark.parametrize("sharded", [False, True], ids=["single", "shard"])
def test_a_safetensors_header_that_lies_is_refused(tmp_path: Path, lie: str, sharded: bool) -> None:
    data, message = SAFETENSORS_LIES[lie]
    name = "one.safetensors" if sharded else "model.safetensors"
    (tmp_path / name).write_bytes(data)
    if sharded:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(BadModelFile, match=message) as caught:
        open_weights(tmp_path)
    assert name in str(caught.value)
    assert len(str(caught.value)) < 600


def test_every_truncation_of_a_safetensors_file_is_refused(tmp_path: Path) -> None:
    whole = safetensors_file({"w": entry(), "v": entry(offsets=[8, 16])}, data=16)
    for length in range(len(whole)):
        (tmp_path / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(BadModelFile):
            open_weights(tmp_path)


# Damage: small edits anywhere in a valid file, with a taste for the numbers that break readers.

EXTREMES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
SNIPPETS = [b"9" * 19, b"-1", b"null", b"[", b"]", b"{", b"}", b'"w":', b",", b"1e400", b"NaN", b"0", b'"', b"\\ud800"]
Edit = Callable[[bytes], bytes]


def _edit(kind: str, at: float, number: int, snippet: bytes, length: int) -> Edit:
    def apply(data: bytes) -> bytes:
        pos = int(at * len(data))
        match kind:
            case "flip":
                return data[:pos] + bytes([data[pos] ^ (number % 255 + 1)]) + data[pos + 1 :] if data else data
            case "u32":
                return data[:pos] + struct.pack("<I", number % 2**32) + data[pos + 4 :]
            case "u64":
                return data[:pos] + struct.pack("<Q", number % 2**64) + data[pos + 8 :]
            case "truncate":
                return data[:pos]
            case "insert":
                return data[:pos] + snippet + data[pos:]
            case "delete":
                return data[:pos] + data[pos + length :]
            case _:
                return data[: pos + length] + data[pos:]  # repeat

    return apply


EDITS = st.lists(
    st.builds(
        _edit,
        st.sampled_from(["flip", "u32", "u64", "truncate", "insert", "delete", "repeat"]),
        st.floats(0, 1, exclude_max=True),
        st.one_of(st.sampled_from(EXTREMES), st.integers(0, 2**64 - 1)),
        st.one_of(st.sampled_from(SNIPPETS), st.binary(min_size=1, max_size=16)),
        st.integers(1, 40),
    ),
    min_size=1,
    max_size=4,
)
DAMAGE = settings(
    max_examples=examples(400),
    deadline=5000,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def _valid_gguf() -> bytes:
    keys = [
        ARCHITECTURE,
        key(ALIGN, U32, struct.pack("<I", 32)),
        key("words", ARRAY, struct.pack("<IQ", STRING, 3) + text("a") + text("bc") + text("ß")),
        key("scores", ARRAY, struct.pack("<IQ3f", 6, 3, 0.5, 1.5, 2.5)),
        key("flag", BOOL, b"\x01"),
        key("size", 10, struct.pack("<Q", 7)),
    ]
    tensors, offset = [], 0
    numbers = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "BF16": 30}
    for name, number in numbers.items():
        tensors.append(tensor(f"blk.{name}", (256, 1), number, offset))
        offset += -(-256 // KINDS[name].block * KINDS[name].nbytes // 32) * 32
    return gguf_file(keys, tensors, data=offset + 1024)


def _valid_header() -> bytes:
    kinds = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I8": 1, "BOOL": 1}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for dtype, size in kinds.items():
        header[f"w.{dtype}"] = entry(dtype, [3, 2], [offset, offset + 6 * size])
        offset += 6 * size
    return json.dumps(header).encode()


VALID_GGUF, VALID_HEADER = _valid_gguf(), _valid_header()


def _only_own_errors(path: Path, file_bytes: int) -> bool:
    """Open and load everything. True if it went well; any error that is not Headway's own comes through."""
    tracemalloc.start()
    started = time.thread_time()
    try:
        with open_weights(path) as weights:
            for name in weights.names():
                try:
                    loaded = weights.load(name, dtype=torch.float32, device=CPU)
                except HeadwayError:
                    continue
                # No packing here holds more than four values a byte.
                assert loaded.numel() <= 4 * file_bytes
        return True
    except HeadwayError:
        return False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 << 20
        assert time.thread_time() - started < 3


def test_the_files_to_be_damaged_are_good(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(VALID_GGUF)
    (tmp_path / "model.safetensors").write_bytes(safetensors_file(VALID_HEADER, data=200))
    assert _only_own_errors(tmp_path / "m.gguf", len(VALID_GGUF))
    assert _only_own_errors(tmp_path, 1000)


@DAMAGE
@given(edits=EDITS, header_only=st.booleans())
def test_a_damaged_gguf_file_meets_only_headways_errors(tmp_path: Path, edits: list[Edit], header_only: bool) -> None:
    cut = VALID_GGUF.rindex(b"BF16") + 40 if header_only else len(VALID_GGUF)
    head, rest = VALID_GGUF[:cut], VALID_GGUF[cut:]
    for edit in edits:
        head = edit(head)
    (tmp_path / "m.gguf").write_bytes(head + rest)
    _only_own_errors(tmp_path / "m.gguf", len(head + rest))


@DAMAGE
@given(edits=EDITS, fix_length=st.booleans())
def test_a_damaged_safetensors_file_meets_only_headways_errors(
    tmp_path: Path, edits: list[Edit], fix_length: bool
) -> None:
    # With the length mended the damage reaches the JSON and what it says; without, the length itself is hit too.
    data = VALID_HEADER if fix_length else safetensors_file(VALID_HEADER, data=200)
    for edit in edits:
        data = edit(data)
    whole = safetensors_file(data, data=200) if fix_length else data
    (tmp_path / "model.safetensors").write_bytes(whole)
    _only_own_errors(tmp_path, len(whole))


@DAMAGE
@given(edits=EDITS)
def test_a_damaged_index_meets_only_headways_errors(tmp_path: Path, edits: list[Edit]) -> None:
    (tmp_path / "one.safetensors").write_bytes(safetensors_file({"w": entry(), "v": entry(offsets=[8, 16])}))
    data = json.dumps({"metadata": {}, "weight_map": {"w": "one.safetensors", "v": "one.safetensors"}}).encode()
    for edit in edits:
        data = edit(data)
    (tmp_path / "model.safetensors.index.json").write_bytes(data)
    _only_own_errors(tmp_path, 1000)
