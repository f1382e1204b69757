"""Saved contexts: by name in memory, or as files that survive the process."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headway.base.errors import InvalidInput, SnapshotError
from headway.base.version import VERSION
from headway.kv import snapshot as files
from headway.kv.snapshot import Snapshot
from headway.kv.table import PageTable
from headway.models.quantized.cpu import QuantizedDecoder
from headway.program.chat.conversation import Conversation
from headway.program.context import Context
from headway.program.ids import position_ids, token_ids
from headway.runtime.passes import Pass

if TYPE_CHECKING:
    from headway.program.engine import Engine

NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Snapshots:
    """The saved contexts of one engine. A name stands for one snapshot, in memory or on disk."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine, self._folder = engine, folder
        self._kept: dict[str, Context] = {}

    def save(self, name: str, context: Context, *, durable: bool) -> None:
        """Keep a fork of the context under a name; replaces what had the name before."""
        path = self._path(name)
        copy = context.fork()
        if durable:
            try:
                files.write(path, self._pack(copy))
            finally:
                copy.release()
            self._forget(name)
            return
        with self._engine._lock:
            self._forget(name)
            copy._table.idle_first = True
            self._kept[name] = copy
        path.unlink(missing_ok=True)

    def open(self, name: str) -> Context | None:
        """A fork of what was saved, or None."""
        path = self._path(name)
        with self._engine._lock:
            if name in self._kept:
                return self._kept[name].fork()
        return self._load(path) if path.exists() else None

    def take(self, name: str) -> Context | None:
        """What was saved, which is then no longer saved; or None."""
        path = self._path(name)
        with self._engine._lock:
            kept = self._kept.pop(name, None)
        if kept is not None:
            kept._table.idle_first = False
            return kept
        context = self._load(path) if path.exists() else None
        path.unlink(missing_ok=True)
        return context

    def delete(self, name: str) -> bool:
        """Forget what was saved; False if there was nothing."""
        path = self._path(name)
        existed = self._forget(name) or path.exists()
        path.unlink(missing_ok=True)
        return existed

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

    def _path(self, name: str) -> Path:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise InvalidInput(
                f"the snapshot name {str(name)[:140]!r} cannot be used; names have 1 to 128 of A–Z a–z 0–9 . _ -"
            )
        return self._folder / f"{name}.safetensors"

    # -- to disk ---------------------------------------------------------------------------------------------------

    def _pack(self, context: Context) -> Snapshot:
        table, engine = context._table, self._engine
        context._settle()
        arrays: list[np.ndarray] = []

        def read() -> None:
            pages = table.held()
            kv = engine._pool.read(pages).movedim(2, 0).contiguous().cpu()
            arrays.append(_bytes(kv).reshape(len(pages), kv[:1].nbytes if len(pages) else 0))
            state = table.state
            arrays.append(_bytes(state.cpu()) if isinstance(state, torch.Tensor) else np.empty(0, np.uint8))

        engine._loop.call(read)
        return Snapshot(
            fingerprint=engine.fingerprint,
            page_size=table.page_size,
            dtype=_kv_type(engine),
            committed=table.committed,
            tokens=np.array(table.tokens, dtype=np.int64),
            positions=np.array(table.positions, dtype=np.int64),
            masks=tuple(table.masks),
            discarded=tuple(i for i, p in enumerate(table.pages) if p is None),
            spans=tuple(table.spans),
            repeatable=table.repeatable,
            kv=arrays[0],
            state=arrays[1],
            program=_program_data(context),
            maker=_maker(engine),
        )

    # -- from disk -------------------------------------------------------------------------------------------------

    def _load(self, path: Path) -> Context:
        saved = files.read(path)
        engine = self._engine
        if saved.fingerprint != engine.fingerprint:
            raise SnapshotError(
                f"the snapshot {path.stem!r} was saved by other weights (fingerprint {saved.fingerprint[:12]}…, "
                f"this model has {engine.fingerprint[:12]}…); open it with the model that saved it, or delete it"
            )
        token_ids(saved.tokens, engine.vocab_size, "saved tokens")
        position_ids(saved.positions, engine.config.max_positions, "saved positions")
        context = engine.context(seed=saved.program.get("seed"), salt=saved.program.get("salt", ""))
        try:
            same = saved.page_size == context.page_size and saved.dtype == _kv_type(engine)
            if same and (not engine.deterministic or saved.maker == _maker(engine)):
                self._restore(context._table, saved)
            else:
                self._recompute(context, saved, path.stem)
            _restore_program(context, saved.program, engine.vocab_size)
        except BaseException:
            context.release()
            raise
        return context

    def _restore(self, table: PageTable, saved: Snapshot) -> None:
        """Restore the pages."""
        engine = self._engine
        layers, _, *page = engine._pool.keys.shape
        shape = (len(saved.kv), layers, 2, *page)
        pages = -(-len(saved.tokens) // saved.page_size)
        self._check(saved, shape, pages)
        with engine._lock:
            fresh = iter(engine._allocator.take(len(saved.kv)))
            table.pages = [None if i in saved.discarded else next(fresh) for i in range(pages)]
            table.spans, table.repeatable = list(saved.spans), saved.repeatable  # first: they say which pages have keys
            table.restore(saved.tokens.tolist(), saved.positions.tolist(), list(saved.masks), saved.committed)

        def fill() -> None:
            raw = engine._pool.raw
            if table.held():
                data = torch.from_numpy(np.ascontiguousarray(saved.kv)).view(raw.dtype).view(shape).movedim(0, 2)
                engine._pool.write(table.held(), data)
            if saved.state.size:
                table.state = torch.from_numpy(saved.state.copy()).view(raw.dtype).to(raw.device)

        engine._loop.call(fill)

    def _check(self, saved: Snapshot, shape: tuple[int, ...], pages: int) -> None:
        """Raise unless the saved bytes have the size of this model's pages and last token: kernels do not check."""
        item = self._engine._pool.raw.element_size()
        fits = saved.kv.nbytes == int(np.prod(shape)) * item and len(saved.kv) + len(set(saved.discarded)) == pages
        if not fits or saved.kv.dtype != np.uint8:
            raise SnapshotError("the snapshot's pages do not have this model's shape; delete it and save it again")
        needed = self._engine.config.hidden_size * item
        if saved.state.dtype != np.uint8 or saved.state.shape not in ((0,), (needed,)):
            raise SnapshotError(
                f"the snapshot's last token has a state of {saved.state.nbytes} bytes and this model's has {needed}; "
                "delete it and save it again"
            )

    @staticmethod
    def _recompute(context: Context, saved: Snapshot, name: str) -> None:
        """Compute the tokens again, under another page size or dtype."""
        if saved.discarded or not saved.repeatable:
            raise SnapshotError(
                f"the snapshot {name!r} was saved with page size {saved.page_size} and {saved.dtype}; it has discarded "
                "or cut-off slots and cannot be recomputed under others: open it with the same settings "
                f"(it was saved by {saved.maker or 'another version'})"
            )
        cuts = sorted({0, len(saved.tokens), *(c for span in saved.spans for c in span)})
        for start, stop in pairwise(cuts):
            masks = saved.masks[start:stop]
            work = Pass(
                tokens=tuple(saved.tokens[start:stop].tolist()),
                positions=tuple(saved.positions[start:stop].tolist()),
                masks=None if all(m is None for m in masks) else tuple(masks),
                causal=(start, stop) not in saved.spans,
            )
            context.execute(work).result()


def _kv_type(engine: Engine) -> str:
    """The type of keys and values, and how activations were quantized to compute them, which changes their values."""
    decoder = engine.decoder
    coding = decoder.row_quantization if isinstance(decoder, QuantizedDecoder) else None
    return engine.info.dtype if coding is None else f"{engine.info.dtype} from rows coded by {coding}"


def _maker(engine: Engine) -> str:
    """What the bits of a deterministic engine depend on."""
    info, mode = engine.info, "deterministic" if engine.deterministic else "not deterministic"
    return f"headway {VERSION}, {info.runner} on {info.device} with {info.threads} threads, {mode}"


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).flatten().numpy()


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


def _restore_program(context: Context, data: dict[str, Any] | Any, vocab: int) -> None:
    pending = token_ids(data["pending"], vocab, "saved pending tokens")
    tools = None if data.get("tools") is None else tuple(data["tools"])
    conversation = Conversation(
        tuple(data["messages"]),
        str(data["rendered"]),
        bool(data["cued"]),
        tools,
        bool(data.get("described")),
        str(data.get("transcript", "")),
    )
    context._restore(pending, conversation, int(data["written"]))
