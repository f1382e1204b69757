"""Saved contexts: by name in memory, or as files that survive the process."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.base.checks import check_integer, check_snapshot_name
from headway.base.config import settings
from headway.base.dataclass import dataclass
from headway.base.errors import Closed, SnapshotError, WrongType
from headway.base.rng import LIMIT
from headway.base.specs.adapters import AdapterMix, Mixes
from headway.base.text import short_repr, shorten
from headway.base.version import VERSION
from headway.kv import snapshot as files
from headway.kv.allocator import Export, HostPages, Import
from headway.kv.pool import Pool
from headway.kv.snapshot import Snapshot
from headway.kv.states import STATE_WIDTH, StateCheckpoint, TableStates
from headway.kv.table import PageTable
from headway.models.quantized.cpu import QuantizedDecoder
from headway.program.chat.conversation import Conversation
from headway.program.checks.ids import position_ids, token_ids
from headway.program.context import Context
from headway.runtime.device import dtype_name
from headway.runtime.passes import Pass

if TYPE_CHECKING:
    from headway.program.engine import Engine


class Snapshots:
    """The saved contexts of one engine. A name stands for one snapshot, in memory or on disk."""

    def __init__(self, engine: Engine, folder: Path | str) -> None:
        """`folder` may be an fsspec URL. It is trusted like the weights: a checksum is not a signature."""
        self._owner, self._folder = weakref.ref(engine), folder  # weak, so that an engine is freed with its last user
        self._kept: dict[str, Context] = {}

    @property
    def _engine(self) -> Engine:
        engine = self._owner()
        assert engine is not None
        return engine

    def forget_all(self) -> None:
        """Forget what is kept in memory: the engine is closed."""
        self._kept.clear()

    def save(self, name: str, context: Context, *, durable: bool) -> None:
        """Keep the context as it is now under a name; replaces what had the name before."""
        path = self._path(name)
        if not isinstance(durable, bool):
            raise WrongType(f"durable is {short_repr(durable)}; it must be True or False")
        if durable:
            files.write(path, self._pack(context))
            self._forget(name)
            return
        copy = context.fork()
        try:
            files.remove(path)
        except BaseException:
            copy.release()
            raise
        with self._engine._lock:
            self._forget(name)
            copy._table.idle_first = True
            self._kept[name] = copy

    def open(self, name: str) -> Context | None:
        """A fork of what was saved, or None."""
        path = self._path(name)
        with self._engine._lock:
            if name in self._kept:
                return self._kept[name].fork()
        return self._load(path)

    def take(self, name: str) -> Context | None:
        """What was saved, which is then no longer saved; or None."""
        path = self._path(name)
        with self._engine._lock:
            kept = self._kept.pop(name, None)
            if kept is not None:
                kept._table.idle_first = False
                return kept
        context = self._load(path)
        try:
            gone = context is not None and not files.remove(path)  # somebody else has taken or deleted it meanwhile
        except BaseException:
            if context is not None:
                context.release()
            raise
        if context is not None and gone:
            context.release()
            return None
        return context

    def delete(self, name: str) -> bool:
        """Forget what was saved; False if there was nothing."""
        path = self._path(name)
        on_disk = files.remove(path)
        return self._forget(name) or on_disk

    def table(self, name: str) -> PageTable | None:
        """The table of what was saved in memory under a name."""
        self._path(name)
        kept = self._kept.get(name)
        return None if kept is None else kept._table

    def _forget(self, name: str) -> bool:
        with self._engine._lock:
            kept = self._kept.pop(name, None)
            if kept is not None:
                kept.release()
            return kept is not None

    def _path(self, name: str) -> Path | files.RemoteFile:
        check_snapshot_name(name)
        if isinstance(self._folder, str):
            return files.RemoteFile(f"{self._folder.rstrip('/')}/{name}.safetensors")
        return self._folder / f"{name}.safetensors"

    # -- to disk ---------------------------------------------------------------------------------------------------

    def _pack(self, context: Context) -> Snapshot:
        """The context as it is now. Its pages are copied as an edit, in order: whatever comes later changes nothing."""
        engine = self._engine
        while True:
            context._settle()  # a preempted context resumes first
            with context._changing():
                if context._table.must_replay:
                    continue
                table = context._table
                used = table.pages[: -(-table.length // table.page_size)]
                live = tuple(page for page in used if page is not None)
                host, state = HostPages(tuple(i for i, page in enumerate(used) if page is not None)), table.state
                engine._allocator.edit(Export(live, host))
                end = None if table.states is None else table.states.at(table.length)
                if end is not None and engine._states is not None:
                    engine._states.pin(end)
                saved = Snapshot(
                    fingerprint="",
                    page_size=table.page_size,
                    dtype=kv_type(engine),
                    committed=table.committed,
                    tokens=np.array(table.tokens, dtype=np.int64),
                    positions=np.array(table.positions, dtype=np.int64),
                    masks=tuple(table.masks),
                    discarded=tuple(i for i, page in enumerate(used) if page is None),
                    spans=tuple(table.spans),
                    repeatable=table.repeatable,
                    kv=np.empty((0, 0), np.uint8),
                    state=np.empty(0, np.uint8),
                    program=_program_data(context),
                    maker=maker(engine),
                    altered=table.altered,
                    partial=tuple(sorted(table.partial)),
                    **_mixes(table.adapters),
                )
                break
        arrays, pool = list[np.ndarray](), self._pool
        engine._loop.call(lambda: None if state is None else arrays.append(pool.save_state(state)))
        recurrent = self._recurrent(end)
        if not isinstance(host.data, np.ndarray):
            raise SnapshotError("the device failed while the context's pages were read; nothing was saved")
        kv = np.ascontiguousarray(np.moveaxis(host.data, 2, 0))
        pages = kv.reshape(len(live), -1).view(np.uint8) if live else np.empty((0, 0), np.uint8)
        last = arrays[0] if arrays else saved.state
        return replace(saved, kv=pages, state=last, recurrent=recurrent, fingerprint=engine.fingerprint)

    def _recurrent(self, end: StateCheckpoint | None) -> np.ndarray:
        """The bytes of a recurrent state, which is pinned until now."""
        saved, states = list[np.ndarray](), self._engine._states
        if end is None or states is None:
            return np.empty(0, np.uint8)
        try:
            self._engine._loop.call(lambda: saved.append(self._pool.save_recurrent(end.place)))
        finally:
            with self._engine._lock:
                states.unpin(end)
        return saved[0]

    # -- from disk -------------------------------------------------------------------------------------------------

    def _load(self, path: Path | files.RemoteFile) -> Context | None:
        """The context in a file, or None if there is no file. All of it is checked before anything is made of it."""
        saved, engine = files.read(path), self._engine
        if saved is None:
            return None
        if saved.fingerprint != engine.fingerprint:
            raise SnapshotError(
                f"the snapshot {path.stem!r} was saved by other weights (fingerprint {saved.fingerprint[:12]!r}…, "
                f"this model has {engine.fingerprint[:12]!r}…); open it with the model that saved it, or delete it"
            )
        try:
            token_ids(saved.tokens, engine.vocab_size, "saved tokens")
            position_ids(saved.positions, engine.config.max_positions, "saved positions")
            program = _Program.of(saved.program, engine.vocab_size)
            same = saved.page_size == engine.page_size and saved.dtype == kv_type(engine)
            exact = same and (not engine.deterministic or saved.maker == maker(engine))
            adapters = self._slot_adapters(saved, path.stem)
            if exact:
                self._check(saved, path.name)
            return self._opened(saved, program, path.stem, adapters, exact=exact)
        except (LookupError, TypeError, ValueError) as error:  # InvalidInput and WrongType among them
            raise SnapshotError(
                f"the snapshot {path.name} cannot be opened: {shorten(str(error), 200)}; {files.AGAIN}"
            ) from error

    def _slot_adapters(self, saved: Snapshot, name: str) -> Mixes | None:
        """What each slot was computed under; None if no slot has an adapter. All adapters must be loaded."""
        mixes: list[AdapterMix | None] = []
        for uses in saved.mixes:
            loaded = []
            for digest, scale in uses:
                adapter = self._engine._adapters.find(digest)
                if adapter is None:
                    raise SnapshotError(
                        f"the snapshot {name!r} was computed under an adapter that is not loaded (its weights have the "
                        f"hash {shorten(digest, 12)!r}…); load it with engine.load_adapter(...) and open it again"
                    )
                loaded.append((adapter, scale))
            mixes.append(AdapterMix.of(loaded))
        return tuple(None if i < 0 else mixes[i] for i in saved.slot_mixes.tolist()) if mixes else None

    def _opened(self, saved: Snapshot, program: _Program, name: str, adapters: Mixes | None, *, exact: bool) -> Context:
        context = self._engine.context(seed=program.seed, salt=program.salt)
        try:
            if exact:
                self._restore(context._table, saved, adapters)
            else:
                self._recompute(context, saved, name, adapters)
            context._restore(program.pending, program.conversation, program.written)
        except BaseException:
            context.release()
            raise
        return context

    def _restore(self, table: PageTable, saved: Snapshot, adapters: Mixes | None) -> None:
        """Restore the pages. They are written by an edit, noted before their keys: whoever finds a page finds it
        written."""
        engine, pool = self._engine, self._pool
        pages = -(-len(saved.tokens) // saved.page_size)
        live = tuple(i for i in range(pages) if i not in set(saved.discarded))
        with engine._lock:
            engine._loop.make_room(len(live), table)
            fresh = dict(zip(live, engine._allocator.take(len(live)), strict=True))
            if fresh:
                data = np.moveaxis(pool.from_bytes(saved.kv.ravel(), self._shape(saved)), 0, 2)
                source = HostPages(live, data)
                engine._allocator.edit(Import(source, tuple(range(len(live))), tuple(fresh.values())))
            table.pages = [fresh.get(i) for i in range(pages)]
            # First: these say which pages have keys.
            table.spans, table.repeatable = list(saved.spans), saved.repeatable
            table.alter(saved.altered, saved.partial)
            log = (saved.tokens.tolist(), saved.positions.tolist(), list(saved.masks))
            table.restore(*log, saved.committed, adapters)

        def restore_state() -> None:
            table.state = pool.load_state(saved.state, dtype_name(engine._model.decoder.dtype))

        if saved.state.size:
            engine._loop.call(restore_state)
        if table.states is not None and saved.recurrent.size and len(saved.tokens):
            self._restore_recurrent(table.states, len(saved.tokens), saved.recurrent)

    def _restore_recurrent(self, own: TableStates, length: int, data: np.ndarray) -> None:
        """Restore the recurrent state after the last slot. Without a place for it, it is computed again."""
        engine, pool = self._engine, self._pool
        with engine._lock:
            end = own.states.take(length)
        if end is not None:
            try:
                engine._loop.call(lambda: pool.load_recurrent(end.place, data))
                with engine._lock:
                    own.add(end)
            finally:
                with engine._lock:
                    own.states.unpin(end)

    @property
    def _pool(self) -> Pool:
        pool = self._engine._pool
        if pool is None:
            raise Closed("the engine sleeps and has no pages; call engine.wake() first")
        return pool

    def _shape(self, saved: Snapshot) -> tuple[int, ...]:
        return (len(saved.kv), *self._pool.page_shape)

    def _check(self, saved: Snapshot, name: str) -> None:
        """Raise unless the saved bytes have the size of this model's pages and last token: kernels do not check."""
        item = self._pool.width
        if saved.kv.dtype != np.uint8 or saved.kv.nbytes != int(np.prod(self._shape(saved))) * item:
            raise SnapshotError(f"the pages of the snapshot {name} do not have this model's shape; {files.AGAIN}")
        needed = self._engine.config.hidden_size * self._engine._model.decoder.dtype.itemsize
        if saved.state.dtype != np.uint8 or saved.state.shape not in ((0,), (needed,)):
            raise SnapshotError(
                f"the last token of the snapshot {name} has a state of {saved.state.nbytes} bytes and this model's has "
                f"{needed}; {files.AGAIN}"
            )
        recurrent = self._engine.config.state_values * STATE_WIDTH
        if saved.recurrent.dtype != np.uint8 or saved.recurrent.shape not in ((0,), (recurrent,)):
            raise SnapshotError(
                f"the recurrent state of the snapshot {name} has {saved.recurrent.nbytes} bytes and this model's has "
                f"{recurrent}; {files.AGAIN}"
            )

    @staticmethod
    def _recompute(context: Context, saved: Snapshot, name: str, adapters: Mixes | None) -> None:
        """Compute the tokens again, under another page size or dtype."""
        if saved.discarded or not saved.repeatable or saved.altered is not None:
            raise SnapshotError(
                f"the snapshot {name!r} was saved with page size {saved.page_size} and {saved.dtype}; it has "
                "discarded, moved or cut-off slots and cannot be recomputed under others: open it with the same "
                f"settings (it was saved by {saved.maker or 'another version'})"
            )
        cuts = sorted({0, len(saved.tokens), *(c for span in saved.spans for c in span)})
        for start, stop in pairwise(cuts):
            masks = saved.masks[start:stop]
            work = Pass(
                tokens=tuple(saved.tokens[start:stop].tolist()),
                positions=tuple(saved.positions[start:stop].tolist()),
                masks=None if all(m is None for m in masks) else tuple(masks),
                causal=(start, stop) not in saved.spans,
                adapters=None if adapters is None else adapters[start:stop],
            )
            context.execute(work).result()


def kv_type(engine: Engine) -> str:
    """The type of keys and values, and how activations were quantized to compute them, which changes their values."""
    decoder = engine._model.decoder
    coding = decoder.row_quantization if isinstance(decoder, QuantizedDecoder) else None
    kept = engine.info.kv_dtype
    return kept if coding is None else f"{kept} from rows quantized by {coding}"


def maker(engine: Engine) -> str:
    """What the bits of a deterministic engine depend on."""
    info, mode = engine.info, "deterministic" if engine.deterministic else "not deterministic"
    return f"headway {VERSION}, {info.runner} on {info.device} with {info.threads} threads, {mode}"


def _mixes(adapters: Mixes) -> dict[str, Any]:
    """A log's adapters as a snapshot has them."""
    known: dict[bytes, int] = {}
    uses: list[tuple[tuple[str, float], ...]] = []
    slots = np.full(len(adapters), -1, np.int64)
    for i, mix in enumerate(adapters):
        if mix is None:
            continue
        if mix.key not in known:
            known[mix.key] = len(uses)
            uses.append(tuple((adapter.digest, scale) for adapter, scale in mix.uses))
        slots[i] = known[mix.key]
    return {"mixes": tuple(uses), "slot_mixes": slots} if uses else {}


def _program_data(context: Context) -> dict[str, Any]:
    conversation = context._conversation
    return {
        "pending": list(context.pending),
        "messages": [dict(m) for m in conversation.messages],
        "rendered": conversation.rendered,
        "cued": conversation.cued,
        "tools": None if conversation.tools is None else [dict(t) for t in conversation.tools],
        "described": conversation.described,
        "transcript": conversation.transcript,
        "written": context._written,
        "seed": context.seed,
        "salt": context._table.salt,
    }


@dataclass(frozen=True)
class _Program:
    """What a snapshot has besides the sequence, checked."""

    pending: list[int]
    conversation: Conversation
    written: int
    seed: int | None
    salt: str

    @classmethod
    def of(cls, data: Mapping[str, Any], vocab: int) -> _Program:
        seed, tools = data["seed"], data["tools"]
        conversation = Conversation(
            tuple(_objects(data["messages"], "messages")),
            _text(data["rendered"], "rendered"),
            bool(data["cued"]),
            None if tools is None else tuple(_objects(tools, "tools")),
            bool(data["described"]),
            _text(data["transcript"], "transcript"),
        )
        return cls(
            pending=token_ids(data["pending"], vocab, "saved pending tokens"),
            conversation=conversation,
            written=check_integer(data["written"], "written"),
            seed=None if seed is None else check_integer(seed, "seed", high=LIMIT - 1),
            salt=_text(data["salt"], "salt"),
        )


def _objects(values: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise WrongType(f"{name} is {short_repr(values)}; it must be a list of objects")
    return values


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise WrongType(f"{name} is {short_repr(value)}; it must be text")
    return value


def snapshot_folder(given: str | Path | None) -> Path | str:
    """Where durable snapshots are; a text with a protocol is an fsspec URL."""
    if given is None:
        return settings().cache / "snapshots"
    if not isinstance(given, str | Path):
        raise WrongType(f"snapshots is {short_repr(given)}; it must be a folder or an fsspec URL")
    return given if isinstance(given, str) and "://" in given else Path(given)
