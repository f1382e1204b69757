"""Saved contexts on disk: pages are found once they are written, damage is refused, failures are SnapshotError."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headway as hw
from headway.base.specs.brle import Brle
from headway.kv import snapshot as files
from headway.program.context import Context
from headway.testing import random_model
from support.checks import assert_close, logit_rows, random_tokens

V, PAGE = 97, 8
TOKENS = random_tokens(V, 29)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hw.Engine]:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    with hw.Engine(random_model(vocab_size=V, max_positions=256), threads=1, pages=24, page_size=PAGE) as made:
        yield made
        made._loop.call(lambda: None)
        with made._lock:
            made._loop.drain()
            made._allocator.check([t.held() for t in made._loop.kv_cache.tables])


@pytest.fixture
def path(engine: hw.Engine, tmp_path: Path) -> Path:
    """The file of a saved context."""
    with engine.context(seed=7, salt="") as context:
        context.forward().input(TOKENS).execute().result()
        context.fill([3, 4])
        context.save("kept", durable=True)
    engine.cache.clear()
    return tmp_path / "snapshots" / "kept.safetensors"


def read(engine: hw.Engine, tokens: list[int]) -> tuple[np.ndarray, int]:
    """The logits after the last of these tokens, in a context of their own, and how many pages were cached."""
    with engine.context() as context:
        forward = context.forward().input(tokens)
        handle = forward.probe(-1, hw.Logits())
        out = forward.execute().result()
        logits = out.logits(handle)
        assert logits is not None
        return logits, out.stats.cache_hits


def is_idle(engine: hw.Engine) -> bool:
    stats = engine.stats()
    return stats.pages_held == 0 and stats.pages_free + stats.pages_cached == stats.pages_total


# -- contents before keys --------------------------------------------------------------------------------------------


def test_a_pass_while_a_snapshot_is_opened_never_finds_pages_that_are_not_written(
    engine: hw.Engine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = read(engine, TOKENS)
    engine.cache.clear()
    call, between = engine._loop.call, []

    def late(work: Callable[[], None]) -> None:
        between.append(read(engine, TOKENS))  # another program, just before the worker gets to the snapshot
        call(work)

    monkeypatch.setattr(engine._loop, "call", late)
    opened = engine.open("kept")
    assert opened is not None
    assert [hits for _, hits in between] == [3]
    assert_close(between[0][0], expected)
    opened.release()


def test_passes_with_the_same_prompt_are_right_while_other_threads_open_a_snapshot(
    engine: hw.Engine, path: Path
) -> None:
    expected, _ = read(engine, TOKENS)
    over = threading.Event()

    def keep_opening() -> None:
        while not over.is_set():
            engine.cache.clear()
            opened = engine.open("kept")
            assert opened is not None
            opened.release()

    thread = threading.Thread(target=keep_opening)
    thread.start()
    try:
        for _ in range(40):
            assert_close(read(engine, TOKENS)[0], expected)
    finally:
        over.set()
        thread.join()


def test_a_context_that_is_preempted_while_it_is_saved_is_saved_whole(
    engine: hw.Engine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = read(engine, [*TOKENS, 1])
    settle, once = Context._settle, []

    def disturbed(context: Context) -> None:
        settle(context)
        if not once:
            once.append(True)
            with engine.context(priority=9) as other:  # takes every page
                other.forward().input(random_tokens(V, 24 * PAGE, seed=3)).execute().result()

    context = engine.context(priority=-9)
    context.forward().input(TOKENS).execute().result()
    monkeypatch.setattr(Context, "_settle", disturbed)
    context.save("again", durable=True)
    monkeypatch.undo()
    assert once
    engine.cache.clear()
    with engine.take("again") as opened:  # type: ignore[union-attr]
        assert_close(logit_rows(opened, [1])[0], expected)
    context.release()


# -- damage ----------------------------------------------------------------------------------------------------------


def test_any_flipped_bit_and_any_cut_is_refused_and_changes_nothing(engine: hw.Engine, path: Path) -> None:
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    random = np.random.default_rng(0)
    bits = [*range(0, 64, 5), *random.integers(64, header * 8, 40), *random.integers(header * 8, len(whole) * 8, 40)]
    for bit in bits:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        refused(engine, path)
    for size in (0, 7, 8, header // 2, header, header + 1, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused(engine, path)
    path.write_bytes(whole + b"\0")
    refused(engine, path)
    path.write_bytes(whole)
    with engine.open("kept") as opened:  # type: ignore[union-attr]
        assert opened.tokens == (*TOKENS, 3, 4)


def refused(engine: hw.Engine, path: Path) -> None:
    for verb in (engine.open, engine.take):
        with pytest.raises(hw.SnapshotError, match="kept"):
            verb("kept")
    assert path.exists()
    assert is_idle(engine)
    assert engine.stats().pages_cached == 0


BAD_FIELDS: dict[str, Callable[[files.Snapshot], dict[str, Any]]] = {
    "page size 0": lambda s: {"page_size": 0},
    "a negative page size": lambda s: {"page_size": -8},
    "a page size in words": lambda s: {"page_size": "eight"},
    "more committed than there is": lambda s: {"committed": 1 << 40},
    "a negative count": lambda s: {"committed": -1},
    "a discarded page that does not exist": lambda s: {"discarded": (99,)},
    "a discarded page twice": lambda s: {"discarded": (0, 0), "kv": s.kv[:2]},
    "a span out of range": lambda s: {"spans": ((500, 600),)},
    "a span backwards": lambda s: {"spans": ((9, 3),)},
    "spans that are numbers": lambda s: {"spans": ([1, 2, 3],)},
    "a token outside the vocabulary": lambda s: {"tokens": s.tokens + V},
    "tokens that are fractions": lambda s: {"tokens": s.tokens.astype(np.float32)},
    "a position past the limit": lambda s: {"positions": s.positions + 1000},
    "fewer positions": lambda s: {"positions": s.positions[:-1]},
    "pages that are missing": lambda s: {"kv": s.kv[:-1]},
    "pages of another model": lambda s: {"kv": s.kv[:, :-4]},
    "a mask that is too long": lambda s: {"masks": (Brle.ones(2), *s.masks[1:])},
    "a mask that is too short": lambda s: {"masks": (*s.masks[:-1], Brle.ones(3))},
    "a mask of nothing": lambda s: {"masks": (Brle.zeros(1), *s.masks[1:])},
    "a bad state": lambda s: {"state": s.state[:-1]},
    "a pending token outside the vocabulary": lambda s: {"program": {**s.program, "pending": [V]}},
    "pending tokens that are text": lambda s: {"program": {**s.program, "pending": "abc"}},
    "no pending tokens": lambda s: {"program": {k: v for k, v in s.program.items() if k != "pending"}},
    "an empty program": lambda s: {"program": {}},
    "messages that are numbers": lambda s: {"program": {**s.program, "messages": [1, 2]}},
    "tools that are text": lambda s: {"program": {**s.program, "tools": "all"}},
    "a seed that is too large": lambda s: {"program": {**s.program, "seed": 1 << 64}},
    "a seed that is text": lambda s: {"program": {**s.program, "seed": "x"}},
    "a salt that is a number": lambda s: {"program": {**s.program, "salt": 3}},
    "a salt that is not Unicode": lambda s: {"program": {**s.program, "salt": "\ud800"}},
    "written in words": lambda s: {"program": {**s.program, "written": "all"}},
    "other weights": lambda s: {"fingerprint": "x"},
}


@pytest.mark.parametrize("what", BAD_FIELDS)
@pytest.mark.parametrize("size", [PAGE, 2 * PAGE], ids=["the same page size", "another one"])
def test_fields_that_make_no_sense_are_refused(engine: hw.Engine, path: Path, what: str, size: int) -> None:
    if size != PAGE and what in ("pages of another model", "a bad state"):
        return  # it is computed again, and nobody looks at them
    saved = files.read(path)
    assert saved is not None
    change = BAD_FIELDS[what](saved)
    if size != PAGE and "page_size" not in change:
        kv = saved.kv[: len(change.get("kv", saved.kv)) // 2] if "kv" in change else saved.kv[:2]
        change = {"page_size": size, "committed": 1, "kv": kv} | {k: v for k, v in change.items() if k != "kv"}
    files.write(path, replace(saved, **change))
    refused(engine, path)


def test_a_file_with_a_right_checksum_and_no_sense_in_it_is_refused(engine: hw.Engine, path: Path) -> None:
    whole = path.read_bytes()
    for facts in ("[]", "null", "{}", '"text"', "[" * 5000 + "]" * 5000):
        path.write_bytes(_with_facts(whole, facts))
        refused(engine, path)


def _with_facts(whole: bytes, facts: str) -> bytes:
    """The file with other facts, and a checksum that is right."""
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    header["__metadata__"] |= {"facts": facts, "checksum": files.BLANK.decode()}
    text = json.dumps(header, separators=(",", ":")).encode()
    data = bytearray(len(text).to_bytes(8, "little") + text + whole[8 + size :])
    start, stop = files._checksum_at(data)
    data[start:stop] = files.blake2b(data, digest_size=32).hexdigest().encode()
    return bytes(data)


# -- the disk --------------------------------------------------------------------------------------------------------


def test_a_folder_in_the_place_of_the_file_is_refused(engine: hw.Engine, path: Path) -> None:
    path.unlink()
    path.mkdir()
    refused(engine, path)
    with engine.context() as context:
        context.forward().input(TOKENS).execute().result()
        for act in (
            lambda: context.save("kept", durable=True),
            lambda: context.save("kept"),
            lambda: engine.delete("kept"),
        ):
            with pytest.raises(hw.SnapshotError, match="kept"):
                act()
    assert is_idle(engine)


@pytest.mark.timeout(60)
def test_a_pipe_in_the_place_of_the_file_is_refused_and_not_waited_for(engine: hw.Engine, path: Path) -> None:
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(hw.SnapshotError, match="not a file"):
        engine.open("kept")
    with pytest.raises(hw.SnapshotError, match="not a file"):
        engine.take("kept")
    assert is_idle(engine)


@pytest.mark.parametrize("whole", [True, False], ids=["after its end", "from its header on"])
def test_a_file_of_terabytes_is_refused_and_not_read(engine: hw.Engine, path: Path, whole: bool) -> None:
    if not whole:
        path.write_bytes((1 << 40).to_bytes(8, "little"))
    os.truncate(path, 1 << 42)  # it takes no place on the disk
    refused(engine, path)


def test_a_file_in_the_place_of_the_folder_is_refused_for_durable_snapshots_only(
    engine: hw.Engine, tmp_path: Path
) -> None:
    (tmp_path / "snapshots").write_text("not a folder")
    assert engine.open("kept") is None
    assert engine.take("kept") is None
    assert not engine.delete("kept")
    with engine.context() as context:
        context.forward().input(TOKENS).execute().result()
        with pytest.raises(hw.SnapshotError, match="durable=False"):
            context.save("kept", durable=True)
        context.save("kept")
    assert engine.delete("kept")


def test_a_full_disk_is_refused_and_what_was_saved_before_stays(
    engine: hw.Engine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with engine.context() as context:
        context.forward().input([1, 2, 3]).execute().result()
        with pytest.raises(hw.SnapshotError, match="No space left"):
            context.save("kept", durable=True)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert is_idle(engine)


def test_what_cannot_be_written_as_json_is_refused(engine: hw.Engine, path: Path) -> None:
    saved = files.read(path)
    assert saved is not None
    with pytest.raises(hw.SnapshotError, match="kept"):
        files.write(path, replace(saved, program={"tools": [object()]}))


def test_a_file_that_is_deleted_while_it_is_opened_or_taken_is_none(
    engine: hw.Engine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, load = path.read_bytes(), files.read

    def too_late(at: Path) -> files.Snapshot | None:
        at.unlink()
        return load(at)

    monkeypatch.setattr(files, "read", too_late)
    assert engine.open("kept") is None
    path.write_bytes(whole)
    assert engine.take("kept") is None

    def just_in_time(at: Path) -> files.Snapshot | None:
        saved = load(at)
        at.unlink()
        return saved

    path.write_bytes(whole)
    monkeypatch.setattr(files, "read", just_in_time)
    assert engine.take("kept") is None  # who deleted it, has it
    assert is_idle(engine)
    assert not engine.delete("kept")
