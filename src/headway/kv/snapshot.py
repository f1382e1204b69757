"""A context on disk: one safetensors file with its pages, its log and a fingerprint of the weights that made it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headway.base.brle import Brle
from headway.base.errors import SnapshotError

FORMAT = "headway-snapshot-1"


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Everything a context is, as arrays and plain data.

    `kv` holds the raw bytes of every live page, in order, [pages, bytes]; `state` those of the last token's residual,
    empty when it was not kept. `maker` says what computed them: others compute the same, but not the same bits.
    `program` is the program layer's own data (pending tokens, messages, …).
    """

    fingerprint: str
    page_size: int
    dtype: str
    committed: int
    tokens: np.ndarray
    positions: np.ndarray
    masks: tuple[Brle | None, ...]
    discarded: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    repeatable: bool
    kv: np.ndarray
    state: np.ndarray
    program: Mapping[str, Any]
    maker: str = ""


def write(path: Path, snapshot: Snapshot) -> None:
    """The snapshot as a file that appears whole or not at all."""
    from safetensors.numpy import save

    masked = [(i, m.runs) for i, m in enumerate(snapshot.masks) if m is not None]
    arrays = {
        "tokens": snapshot.tokens,
        "positions": snapshot.positions,
        "kv": snapshot.kv,
        "state": snapshot.state,
        "mask_slots": np.array([i for i, _ in masked], dtype=np.int64),
        "mask_counts": np.array([len(runs) for _, runs in masked], dtype=np.int64),
        "mask_runs": np.array([r for _, runs in masked for r in runs], dtype=np.int64),
    }
    facts = {
        "fingerprint": snapshot.fingerprint,
        "page_size": snapshot.page_size,
        "dtype": snapshot.dtype,
        "committed": snapshot.committed,
        "discarded": list(snapshot.discarded),
        "spans": [list(s) for s in snapshot.spans],
        "repeatable": snapshot.repeatable,
        "program": dict(snapshot.program),
        "maker": snapshot.maker,
    }
    data = save(arrays, metadata={"format": FORMAT, "facts": json.dumps(facts)})
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read(path: Path) -> Snapshot:
    """The snapshot in a file; anything that does not hold together is refused."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        if metadata.get("format") != FORMAT:
            raise SnapshotError(f"{path.name} is no snapshot of this version; its format is {metadata.get('format')!r}")
        return _parse(json.loads(metadata["facts"]), arrays)
    except SnapshotError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AssertionError) as e:
        raise SnapshotError(f"the snapshot {path.name} cannot be read: {e}; delete it and save it again") from None


def _parse(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Snapshot:
    tokens, positions = arrays["tokens"], arrays["positions"]
    masks: list[Brle | None] = [None] * len(tokens)
    ends = np.cumsum(arrays["mask_counts"])
    for slot, count, end in zip(arrays["mask_slots"], arrays["mask_counts"], ends, strict=True):
        masks[int(slot)] = Brle.from_runs(arrays["mask_runs"][end - count : end].tolist())
    snapshot = Snapshot(
        fingerprint=str(facts["fingerprint"]),
        page_size=int(facts["page_size"]),
        dtype=str(facts["dtype"]),
        committed=int(facts["committed"]),
        tokens=tokens,
        positions=positions,
        masks=tuple(masks),
        discarded=tuple(int(i) for i in facts["discarded"]),
        spans=tuple((int(a), int(b)) for a, b in facts["spans"]),
        repeatable=bool(facts["repeatable"]),
        kv=arrays["kv"],
        state=arrays["state"],
        program=dict(facts["program"]),
        maker=str(facts.get("maker", "")),
    )
    pages = -(-len(tokens) // snapshot.page_size)
    assert tokens.ndim == positions.ndim == 1, "the log is not flat"
    assert len(tokens) == len(positions), "the log's lengths differ"
    assert snapshot.kv.ndim == 2, "the pages are not a table"
    assert len(snapshot.kv) == pages - len(snapshot.discarded), "pages are missing"
    assert 0 <= snapshot.committed * snapshot.page_size <= len(tokens), "more is committed than there is"
    assert all(0 <= i < pages for i in snapshot.discarded), "a discarded page does not exist"
    return snapshot
